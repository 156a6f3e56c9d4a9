/* What the files of the native core share. Plain C11 over libjpeg-turbo, without Python's API.
 *
 * Functions that Python calls are marked DT_API, and declared to ctypes in library.py. They keep no global state, never
 * exit, and may be called from any number of threads, each with a workspace of its own.
 */
#ifndef DRIVETRAIN_CORE_H
#define DRIVETRAIN_CORE_H

#include <stddef.h>
#include <stdint.h>

#define DT_API __attribute__((visibility("default")))

/* The compiler makes a variant of the function for each instruction set, and the system chooses one when the library is
 * loaded. All have the same results: integers, or floats without contraction to fused multiply-adds. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(DT_NO_CLONES)
#define DT_CLONES
#elif defined(__clang__) || __GNUC__ < 12
#define DT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define DT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

/* Bytes of a message, with its end. */
#define DT_MESSAGE 256

/* A sample's status. */
enum { DT_OK = 0, DT_UNDECODABLE = 1, DT_WRONG_SIZE = 2, DT_UNREADABLE = 3, DT_NO_MEMORY = 4 };

/* ---- memory.c ---- */

/* Inner loops read and write whole blocks of this many bytes: all buffers are longer by as much. */
#define DT_BLOCK 128

/* Memory that grows on demand; {0} at first. */
typedef struct {
    uint8_t *data;
    size_t size;
} dt_buffer;

/* Return at least `size` bytes, aligned to 64, and DT_BLOCK further ones; NULL without memory. The content is lost. */
void *dt_reserve(dt_buffer *buffer, size_t size);
void dt_release(dt_buffer *buffer);

/* ---- jpeg.c ---- */

/* Part of a picture: `rows` lines of `columns` pixels, of three bytes unless it is an array's, `stride` bytes apart. */
typedef struct {
    const uint8_t *data;
    size_t stride;
    int64_t rows, columns;
} dt_image;

/* A rectangle of pixels, without `bottom` and `right`. */
typedef struct {
    int64_t top, left, bottom, right;
} dt_region;

/* Decode `wanted` of a JPEG that must have `height` × `width` pixels, at 1/`share` (1, 2, 4 or 8) of its size; `wanted`
 * is in pixels of that smaller picture. `fast` selects libjpeg's fast inverse DCT. The pixels are in `memory`. */
int dt_decode(const uint8_t *data, size_t size, int64_t height, int64_t width, int share, int fast, dt_region wanted,
              dt_buffer *memory, dt_image *image);

/* Whether a JPEG decodes to its end at 1/`share` of its size; else `message` (DT_MESSAGE bytes) says what libjpeg complains of.
 * The pixels are not kept. */
DT_API int dt_jpeg_check(const uint8_t *data, size_t size, int64_t height, int64_t width, int share, char *message);

/* ---- crc32.c ---- */

/* zlib's CRC-32 of `data`, continuing `crc`, which is 0 at first. */
DT_API uint32_t dt_crc32(uint32_t crc, const uint8_t *data, size_t size);

/* ---- resize.c ---- */

/* The working memory of a resize. */
typedef struct {
    dt_buffer first, weights, exact, rows, columns, turned;
} dt_resizing;

/* Resize the part of a picture that begins at (`top`, `left`) and has `height` × `width` pixels, in fractions of pixels,
 * to `target` (`out_height`, `out_width`, 3), antialiased bilinear, and mirror it if `flip`. `image` holds the whole
 * pixels that the part touches, and its first one is (`floor(top)`, `floor(left)`). Returns DT_OK or DT_NO_MEMORY. */
int dt_resize(dt_image image, double top, double left, double height, double width, int flip, uint8_t *target,
              int64_t out_height, int64_t out_width, dt_resizing *memory);


/* Resize a whole picture with Pillow's bilinear or bicubic filter, antialiased, and mirror it if `flip`; with the same bits. */
int dt_resize_finely(dt_image image, int bicubic, int flip, uint8_t *target, int64_t out_height, int64_t out_width,
                     dt_resizing *memory);
/* Take the nearest pixels, of `pixel` bytes, as Pillow does. */
int dt_resize_nearest(dt_image image, size_t pixel, uint8_t *target, int64_t out_height, int64_t out_width,
                      dt_resizing *memory);


/* Pillow's weights, whose sum is 1, of the i-th of `count` outputs over the lines 0 to `size` - 1: bilinear, or bicubic if
 * `bicubic`. Returns how many lines there are, from `*begin` on; at most dt_most_weights(), for which `weights` has room. */
int64_t dt_exact_weights(int bicubic, int64_t size, int64_t count, int64_t i, double *weights, int64_t *begin);
int64_t dt_most_weights(int bicubic, int64_t size, int64_t count);

/* Weights with 22 bits after the point, as Pillow's for bytes. */
typedef struct {
    int64_t *first;
    int32_t *weights; /* (count, most) */
    int64_t most;
} dt_fine_filter;

/* Weigh the lines for `count` outputs. Returns whether there was memory. */
int dt_weigh_finely(int bicubic, int64_t size, int64_t count, dt_resizing *memory, dt_fine_filter *found);
/* Set each of `count` lines of `target` to the weighted sum of lines of `source`, over `lanes` bytes, in whole blocks. */
void dt_blend_finely(const uint8_t *source, size_t stride, size_t lanes, const dt_fine_filter *filter, int64_t count,
                     uint8_t *target, size_t target_stride);

/* ---- area.c: the resize of OpenCV's INTER_AREA, bit for bit (version 4.6) ---- */

/* The bytes of working memory that dt_area needs; 0 for a side that is not in 1 to 65535. */
DT_API size_t dt_area_bytes(int64_t height, int64_t width, int64_t out_height, int64_t out_width);

/* Resize `height` lines of `width` pixels, `stride` bytes apart, to the dense picture `target`. Returns DT_OK;
 * DT_WRONG_SIZE for such a side; DT_NO_MEMORY if `bytes`, the size of `workspace` (16-byte aligned), do not suffice. */
DT_API int dt_area(const uint8_t *source, size_t stride, int64_t height, int64_t width, uint8_t *target, int64_t out_height,
            int64_t out_width, void *workspace, size_t bytes);

/* ---- pixels.c: on images (`height`, `width`, 3), in place unless there is a target ---- */

void dt_flip(uint8_t *image, int64_t height, int64_t width);
/* Copy `image` shifted by pixels, with edges reflected. */
void dt_shifted_copy(dt_image image, int64_t down, int64_t right, uint8_t *target);
/* Pillow's arithmetic of one level: from `base` to `value` by `factor`, cut to 0–255, truncated. */
uint8_t dt_blend(float base, float value, float factor);
/* The mean of Pillow's grey values, rounded. */
int64_t dt_mean_grey(const uint8_t *image, int64_t pixels);
/* Blend each pixel with its grey value. */
void dt_saturate(uint8_t *image, int64_t pixels, float factor);
/* torchvision's ColorJitter; `factors`: brightness, contrast, saturation, and the index of their order, one of six. */
void dt_jitter_color(uint8_t *image, int64_t pixels, const double *factors);
void dt_cut_out(uint8_t *image, int64_t width, int64_t top, int64_t left, int64_t side, const uint8_t *fill);
/* `values` = byte · `factors` + `summands`, each (3 · width), line by line. */
void dt_normalise(const uint8_t *image, int64_t height, int64_t width, const float *factors, const float *summands,
                  float *values);
/* `values` = each level's entry in its channel's row of `table` (3, 256): bfloat16. */
void dt_look_up(const uint8_t *image, int64_t pixels, const uint16_t *table, uint16_t *values);

/* ---- planes.c: images of any number of channels, of 8 or 16 bits: `bytes` per value, `pixel` per pixel ---- */

/* Resize a whole picture, antialiased: bilinear, or bicubic if `cubic`; bytes with Pillow's bits if `fine`. Every channel
 * by itself. Returns DT_OK or DT_NO_MEMORY. */
int dt_planes_resize(dt_image image, int64_t channels, int64_t bytes, int cubic, int fine, uint8_t *target,
                     int64_t out_height, int64_t out_width, dt_resizing *memory);
void dt_planes_flip(uint8_t *image, size_t pixel, int64_t height, int64_t width);
void dt_planes_shift(dt_image image, size_t pixel, int64_t down, int64_t right, uint8_t *target);
void dt_planes_cut_out(uint8_t *image, size_t pixel, int64_t width, int64_t top, int64_t left, int64_t side,
                       const uint8_t *fill);
/* `values` = level · `factors` + `summands`, each (`lanes`), for `height` lines of as many values; in float32, or rounded
 * to bfloat16 if `half`. */
void dt_planes_normalise(const uint8_t *image, int64_t bytes, int64_t height, int64_t lanes, const float *factors,
                         const float *summands, int half, void *values);
/* The position that `at` is reflected to, of `size`. */
int64_t dt_reflected(int64_t at, int64_t size);

/* ---- policies.c ---- */

/* The drawn operations of an augmentation policy on one image: `chains` chains of `steps` operations each. */
typedef struct {
    int64_t chains, steps;
    const int64_t *operations;
    const double *magnitudes;
    const float *weights; /* (1 + chains): of the image and of each chain's result; NULL: the only chain replaces it */
} dt_policy;

/* Returns DT_OK or DT_NO_MEMORY. */
int dt_augment(uint8_t *image, int64_t height, int64_t width, const dt_policy *policy, dt_buffer *memory);

/* ---- transcode.c: lossless recoding of JPEGs ---- */

/* Recode a JPEG as baseline (progressive and arithmetic ones, too) with Huffman tables of its own. The markers that
 * remain are those that decoding needs: no EXIF data, no colour profile, no comments.
 *
 * Returns DT_OK and a `result` to be freed with dt_free, or NULL if it would have more than `most` bytes. Otherwise
 * `message` has the reason: DT_UNDECODABLE for an error or a warning of libjpeg; DT_WRONG_SIZE if the coefficients
 * would take more than `memory` bytes, which are then not allocated; DT_NO_MEMORY. */
DT_API int dt_recode(const uint8_t *jpeg, size_t size, uint64_t memory, size_t most, uint8_t **result,
                     size_t *result_size, char *message);
DT_API void dt_free(void *result);

#endif
