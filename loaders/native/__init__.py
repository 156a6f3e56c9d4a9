"""Bindings to native libraries: libturbojpeg, the functions of FFCV, and the compiling of kernels."""
