/* libjpeg-turbo, with its errors caught. */
#include "core.h"

#include <stdio.h>
#include <jpeglib.h>

/* The version of libjpeg's interface that the library was built for: a first sign of life. */
DT_API int dt_jpeg_version(void) { return JPEG_LIB_VERSION; }
