"""Bindings to native libraries: our own, libturbojpeg, the functions of FFCV, and the compiling of kernels."""
