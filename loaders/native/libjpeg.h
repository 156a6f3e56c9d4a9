/* libjpeg as jpeg.c and transcode.c use it: its versions, its errors as statuses, and limits of time and memory. */
#ifndef DRIVETRAIN_LIBJPEG_H
#define DRIVETRAIN_LIBJPEG_H

#include "core.h"

#include <setjmp.h>
#include <stdio.h> /* which jpeglib.h needs */

#include <jpeglib.h>

/* From version 7 of the interface on (Ubuntu's libjpeg-turbo8-dev is of version 8), blocks have two sides. */
#if JPEG_LIB_VERSION >= 70
#define DT_BLOCK_WIDTH(jpeg) ((jpeg)->min_DCT_h_scaled_size)
#define DT_BLOCK_HEIGHT(jpeg) ((jpeg)->min_DCT_v_scaled_size)
#define DT_OWN_BLOCK_WIDTH(component) ((component)->DCT_h_scaled_size)
#define DT_OWN_BLOCK_HEIGHT(component) ((component)->DCT_v_scaled_size)
#else
#define DT_BLOCK_WIDTH(jpeg) ((jpeg)->min_DCT_scaled_size)
#define DT_BLOCK_HEIGHT(jpeg) ((jpeg)->min_DCT_scaled_size)
#define DT_OWN_BLOCK_WIDTH(component) ((component)->DCT_scaled_size)
#define DT_OWN_BLOCK_HEIGHT(component) ((component)->DCT_scaled_size)
#endif

/* What one call needs to escape from libjpeg. */
typedef struct {
    struct jpeg_error_mgr manager; /* first: libjpeg passes its address */
    struct jpeg_progress_mgr progress;
    struct jpeg_source_mgr source;
    const uint8_t *next, *end; /* of the file: what libjpeg gets next, and its end */
    int is_arithmetic;
    const uint8_t *marker; /* of an arithmetic file: the first from `next` on; before `next` if it was not looked for */
    int scan, zeros;       /* how many were added to the codes of this scan */
    jmp_buf escape;
    const dt_limits *limits;
    int most_scans;
    int status; /* DT_OK, or that of the error that was escaped from */
    char message[DT_MESSAGE];
} dt_jpeg_errors;

/* Return libjpeg's error manager, for the `err` of its structures: errors and warnings escape, nothing is printed. */
struct jpeg_error_mgr *dt_catch_errors(dt_jpeg_errors *errors, const dt_limits *limits);

/* Call `work(argument)`, which calls libjpeg, and return when it has returned or escaped, with the status. What `work`
 * changes belongs to the caller of this function, not to a function that calls setjmp: so it keeps its values. */
int dt_guarded(dt_jpeg_errors *errors, void (*work)(void *), void *argument);

_Noreturn void dt_escape(dt_jpeg_errors *errors, int status, const char *message);

/* Create the structure, whose `err` is set, and read the header. Escape if decoding would take more time or memory than
 * allowed; `keeps_coefficients`: whether those of the whole picture are wanted. */
void dt_open_jpeg(j_decompress_ptr jpeg, const uint8_t *data, size_t size, int keeps_coefficients);

#endif
