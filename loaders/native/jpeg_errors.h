/* libjpeg's errors as statuses and messages: shared by the files that call libjpeg. */
#ifndef DRIVETRAIN_JPEG_ERRORS_H
#define DRIVETRAIN_JPEG_ERRORS_H

#include "core.h"

#include <setjmp.h>
#include <stdio.h> /* which jpeglib.h needs */

#include <jpeglib.h>

/* What one call needs to escape from libjpeg. The caller sets `escape` with setjmp, in a function that is still running
 * when libjpeg is called. */
typedef struct {
    struct jpeg_error_mgr manager; /* first: libjpeg passes its address */
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    int status; /* of the error that was escaped from */
    char message[DT_MESSAGE];
} dt_jpeg_errors;

/* Return libjpeg's error manager, for the `err` of its structures: errors and warnings escape, nothing is printed. */
struct jpeg_error_mgr *dt_catch_errors(dt_jpeg_errors *errors);

/* Let a picture with too many scans escape, too. Call it once libjpeg's structure is created, which clears it. */
void dt_limit_scans(j_decompress_ptr jpeg);

_Noreturn void dt_escape(dt_jpeg_errors *errors, int status, const char *message);

#endif
