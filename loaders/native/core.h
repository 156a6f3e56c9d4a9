/* The native core's own declarations: what its files share. Everything is plain C11 over libjpeg-turbo; no Python.
 *
 * Functions that Python calls are marked DT_API and listed in library.py. They hold no global state, never exit, and
 * may be called from any number of threads, each with a workspace of its own.
 */
#ifndef DRIVETRAIN_CORE_H
#define DRIVETRAIN_CORE_H

#include <stddef.h>
#include <stdint.h>

#define DT_API __attribute__((visibility("default")))

/* The compiler makes a variant of the function for each instruction set, and the loader chooses one. Results are the
 * same: integers, or floats without contraction. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(DT_NO_CLONES)
#define DT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define DT_CLONES
#endif

enum { DT_OK = 0, DT_UNDECODABLE = 1, DT_WRONG_SIZE = 2, DT_UNREADABLE = 3, DT_NO_MEMORY = 4 };

/* Part of a picture in memory: `rows` lines of `columns` pixels of `channels` bytes, `stride` bytes apart. */
typedef struct {
    const uint8_t *data;
    size_t stride;
    int64_t rows, columns;
} dt_image;

/* area.c: the resize of OpenCV's INTER_AREA, 8-bit RGB, bit for bit (version 4.6). */

/* The bytes of working memory that dt_area needs; 0 for a side that is not in 1 to 65535. */
DT_API size_t dt_area_bytes(int64_t height, int64_t width, int64_t out_height, int64_t out_width);

/* Resizes `height` lines of `width` pixels, `stride` bytes apart, to the dense picture `target`. Returns DT_OK;
 * DT_WRONG_SIZE for such a side; DT_NO_MEMORY if `bytes`, the size of `workspace` (16-byte aligned), do not suffice. */
DT_API int dt_area(const uint8_t *source, size_t stride, int64_t height, int64_t width, uint8_t *target,
                   int64_t out_height, int64_t out_width, void *workspace, size_t bytes);

/* transcode.c: lossless recoding of JPEGs. */

enum { DT_MESSAGE = 256 }; /* bytes of a message, with its end */

/* Recodes a JPEG as baseline (progressive and arithmetic ones, too) with Huffman tables of its own. The markers that
 * remain are those that decoding needs: no EXIF data, no colour profile, no comments.
 *
 * Returns DT_OK and a `result` to be freed with dt_free, or NULL if it would have more than `most` bytes. Otherwise
 * `message` has the reason: DT_UNDECODABLE for an error or a warning of libjpeg; DT_WRONG_SIZE if the coefficients
 * would take more than `memory` bytes, which are then not allocated; DT_NO_MEMORY. */
DT_API int dt_recode(const uint8_t *jpeg, size_t size, uint64_t memory, size_t most, uint8_t **result,
                     size_t *result_size, char *message);
DT_API void dt_free(void *result);

#endif
