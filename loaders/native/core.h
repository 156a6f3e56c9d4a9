/* What the files of the native core share. Plain C11 over libjpeg-turbo, without Python's API.
 *
 * Functions that Python calls are marked DT_API, and declared to ctypes in library.py. They keep no global state, never
 * exit, and may be called from any number of threads, each with a workspace of its own.
 */
#ifndef DRIVETRAIN_CORE_H
#define DRIVETRAIN_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define DT_API __attribute__((visibility("default")))
#define DT_HIDDEN __attribute__((visibility("hidden"))) /* of functions with variants, for which the compiler forgets it */

/* The compiler makes a variant of the function for each instruction set, and the system chooses one when the library is
 * loaded. All have the same results: integers, or floats without contraction to fused multiply-adds. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(DT_NO_CLONES)
#define DT_CLONES
#elif defined(__clang__) || __GNUC__ < 12
#define DT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define DT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

/* Files and positions in them have 64 bits, and numbers in files and in Python's memory have their low bytes first. */
_Static_assert(sizeof(size_t) == 8 && sizeof(off_t) == 8, "a system with 64 bits");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a little-endian processor");

/* The number of what Python declares of this file in library.py. Count it up when a function, a structure, or the shape
 * of an array that it points to changes. */
#ifndef DT_INTERFACE
#define DT_INTERFACE 2
#endif

/* Write the interface's number, and then the sizes of dt_samples, dt_settings, dt_choices, dt_views and dt_limits, to
 * `values` (6). */
DT_API void dt_interface(int64_t *values);

/* Bytes of a message, with its end. */
#define DT_MESSAGE 256

/* A sample's status. */
enum {
    DT_OK = 0,
    DT_UNDECODABLE = 1,
    DT_WRONG_SIZE = 2,
    DT_UNREADABLE = 3,
    DT_NO_MEMORY = 4, /* the system refused it */
    DT_STOPPED = 5,
    DT_TOO_LARGE = 6 /* it would take more memory than the limit */
};

/* Limits of a call; without them (NULL), only memory is limited, by what the system gives. */
typedef struct {
    const int32_t *stop; /* the call ends soon after another thread sets it: its results mean nothing; NULL: never */
    uint64_t memory;     /* bytes that a JPEG's coefficients may take, if they are kept: where it has several scans */
} dt_limits;

static inline int dt_is_stopped(const dt_limits *limits)
{
    return limits != NULL && limits->stop != NULL && __atomic_load_n(limits->stop, __ATOMIC_RELAXED) != 0;
}

/* ---- memory.c ---- */

/* Inner loops read and write whole blocks of this many bytes: all buffers are longer by as much. */
#define DT_BLOCK 128

static inline size_t dt_whole_blocks(size_t bytes) { return (bytes + DT_BLOCK - 1) / DT_BLOCK * DT_BLOCK; }

static inline int64_t dt_larger(int64_t a, int64_t b) { return a > b ? a : b; }

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

/* A JPEG that must have `height` × `width` pixels. */
typedef struct {
    const uint8_t *data;
    size_t size;
    int64_t height, width;
} dt_jpeg;

/* Decode `wanted` of a JPEG at 1/`share` (1, 2, 4 or 8) of its size; `wanted` is in pixels of that smaller picture. `fast`
 * selects libjpeg's fast inverse DCT. The pixels are in `memory`. */
int dt_decode(dt_jpeg source, int share, int fast, dt_region wanted, const dt_limits *limits, dt_buffer *memory,
              dt_image *image);

/* Write to `message` which libjpeg is in use: its version, and its file. Returns DT_OK, or DT_UNDECODABLE with the reason why
 * it is not one that this library can use. */
DT_API int dt_jpeg_version(char *message);

/* Whether a JPEG decodes to its end at 1/`share` of its size; else `message` (DT_MESSAGE bytes) says what libjpeg complains of.
 * The pixels are not kept. */
DT_API int dt_jpeg_check(const uint8_t *data, size_t size, int64_t height, int64_t width, int share,
                         const dt_limits *limits, char *message);

/* ---- crc32.c ---- */

/* zlib's CRC-32 of `data`, continuing `crc`, which is 0 at first. */
DT_API uint32_t dt_crc32(uint32_t crc, const uint8_t *data, size_t size);

/* ---- resize.c ---- */

/* The working memory of a resize, and what it may take: before `dt_reserve_all`, its functions reserve nothing else. */
typedef struct {
    dt_buffer first, weights, exact, rows, columns, turned;
    const dt_limits *limits;
} dt_resizing;

/* The bytes of each of these buffers. */
typedef struct {
    size_t first, weights, exact, rows, columns, turned;
} dt_resizing_bytes;

/* Reserve these bytes. Returns whether there was memory. */
int dt_reserve_all(dt_resizing *memory, dt_resizing_bytes bytes);

/* Resize the part of a picture that begins at (`top`, `left`) and has `height` × `width` pixels, in fractions of pixels,
 * to `target` (`out_height`, `out_width`, 3), antialiased bilinear, and mirror it if `flip`. `image` holds the whole
 * pixels that the part touches, and its first one is (`floor(top)`, `floor(left)`). Returns DT_OK or DT_NO_MEMORY. */
int dt_resize(dt_image image, double top, double left, double height, double width, int flip, uint8_t *target,
              int64_t out_height, int64_t out_width, dt_resizing *memory);
/* What this takes for an `image` of `rows` × `columns`. It does not shrink if these grow; the same holds for those below. */
dt_resizing_bytes dt_resize_bytes(int64_t rows, int64_t columns, int64_t out_height, int64_t out_width);

/* Resize a whole picture with Pillow's bilinear or bicubic filter, antialiased, and mirror it if `flip`; with the same bits. */
int dt_resize_finely(dt_image image, int bicubic, int flip, uint8_t *target, int64_t out_height, int64_t out_width,
                     dt_resizing *memory);
dt_resizing_bytes dt_resize_finely_bytes(int64_t rows, int64_t columns, int bicubic, int64_t out_height, int64_t out_width);

/* Take the nearest pixels, of `pixel` bytes, as Pillow does. */
int dt_resize_nearest(dt_image image, size_t pixel, uint8_t *target, int64_t out_height, int64_t out_width,
                      dt_resizing *memory);
dt_resizing_bytes dt_resize_nearest_bytes(int64_t out_height, int64_t out_width);

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

/* Weigh the lines for `count` outputs, in memory that is reserved. */
dt_fine_filter dt_weigh_finely(int bicubic, int64_t size, int64_t count, dt_resizing *memory);
/* Set each of `count` lines of `target` to the weighted sum of lines of `source`, over `lanes` bytes, in whole blocks. */
DT_HIDDEN void dt_blend_finely(const uint8_t *source, size_t stride, size_t lanes, const dt_fine_filter *filter, int64_t count,
                     const dt_limits *limits, uint8_t *target, size_t target_stride);
/* The end of such a resize: blend `rows` lines of `width` bytes, `stride` bytes apart, to the dense lines of `target`.
 * `memory->rows` begins with them, and has room for `out_height` further ones. */
void dt_blend_down(int bicubic, int64_t rows, size_t stride, size_t width, uint8_t *target, int64_t out_height,
                   dt_resizing *memory);

/* ---- area.c: the resize of OpenCV's INTER_AREA, bit for bit (version 4.6) ---- */

/* The bytes of working memory that dt_area needs; 0 for a side that is not in 1 to 65535. */
DT_API size_t dt_area_bytes(int64_t height, int64_t width, int64_t out_height, int64_t out_width);

/* Resize `height` lines of `width` pixels, `stride` bytes apart, to the dense picture `target`. Returns DT_OK;
 * DT_WRONG_SIZE for such a side; DT_NO_MEMORY if there is no `workspace` (16-byte aligned), or `bytes`, its size, do not
 * suffice. */
DT_API int dt_area(const uint8_t *source, size_t stride, int64_t height, int64_t width, const dt_limits *limits,
                   uint8_t *target, int64_t out_height, int64_t out_width, void *workspace, size_t bytes);

/* ---- pixels.c: on images (`height`, `width`, 3); those with `pixel` on images of any pixels, of so many bytes. In place unless
 * there is a target. ---- */

void dt_flip(uint8_t *image, size_t pixel, int64_t height, int64_t width);
/* Copy `image` shifted by pixels, with edges reflected. */
void dt_shifted_copy(dt_image image, size_t pixel, int64_t down, int64_t right, uint8_t *target);
/* Pillow's arithmetic of one level: from `base` to `value` by `factor`, cut to 0–255, truncated. */
uint8_t dt_blend(float base, float value, float factor);
/* The mean of Pillow's gray values, rounded. */
int64_t dt_mean_gray(const uint8_t *image, int64_t pixels);
/* Blend each pixel with its gray value. */
void dt_saturate(uint8_t *image, int64_t pixels, float factor);
/* torchvision's ColorJitter; `factors`: brightness, contrast, saturation, and the index of their order, one of six. */
void dt_jitter_color(uint8_t *image, int64_t pixels, const double *factors);
void dt_cut_out(uint8_t *image, size_t pixel, int64_t width, int64_t top, int64_t left, int64_t side, const uint8_t *fill);
/* `values` = each level's entry in its channel's row of `table` (3, 256): bfloat16. */
void dt_look_up(const uint8_t *image, int64_t pixels, const uint16_t *table, uint16_t *values);

/* ---- planes.c: images of any number of channels, of 8 or 16 bits: `bytes` per value, `pixel` per pixel ---- */

/* Resize a whole picture, antialiased: bilinear, or bicubic if `cubic`; bytes with Pillow's bits if `fine`. Every channel
 * by itself. Returns DT_OK or DT_NO_MEMORY. */
int dt_planes_resize(dt_image image, int64_t channels, int64_t bytes, int cubic, int fine, uint8_t *target,
                     int64_t out_height, int64_t out_width, dt_resizing *memory);
dt_resizing_bytes dt_planes_resize_bytes(int64_t rows, int64_t columns, int64_t channels, int64_t bytes, int cubic, int fine,
                                         int64_t out_height, int64_t out_width);
/* `values` = level · `factors` + `summands`, each (`lanes`), for `height` lines of as many values; in float32, or rounded
 * to bfloat16 if `half`. */
void dt_planes_normalize(const uint8_t *image, int64_t bytes, int64_t height, int64_t lanes, const float *factors,
                         const float *summands, int half, void *values);

/* ---- policies.c ---- */

/* The drawn operations of an augmentation policy on one image: `chains` chains of `steps` operations each. */
typedef struct {
    int64_t chains, steps;
    const int64_t *operations;
    const double *magnitudes;
    const float *weights; /* (1 + chains): of the image and of each chain's result; NULL: the only chain replaces it */
} dt_policy;

size_t dt_augment_bytes(int64_t height, int64_t width);
/* Returns DT_OK or DT_NO_MEMORY. */
int dt_augment(uint8_t *image, int64_t height, int64_t width, const dt_policy *policy, dt_buffer *memory);

/* ---- transcode.c: lossless recoding of JPEGs ---- */

/* Recode a JPEG as baseline (progressive and arithmetic ones, too) with Huffman tables of its own. The markers that
 * remain are those that decoding needs: no EXIF data, no color profile, no comments.
 *
 * Returns DT_OK and a `result` to be freed with dt_free, or NULL if it would have more than `most` bytes. Otherwise
 * `message` (DT_MESSAGE bytes) has the reason: DT_UNDECODABLE for an error or a warning of libjpeg; DT_TOO_LARGE if the
 * coefficients would take more memory than the limit, which is then not allocated; DT_NO_MEMORY; DT_STOPPED. */
DT_API int dt_recode(const uint8_t *jpeg, size_t size, size_t most, const dt_limits *limits, uint8_t **result,
                     size_t *result_size, char *message);
DT_API void dt_free(void *result);

/* ---- draws.c: the random draws of samples, as functions of their keys ---- */

/* Write the keys of the samples `indices` (n) to `keys` (n). */
DT_API void dt_sample_keys(uint64_t seed, uint64_t epoch, const int64_t *indices, int64_t n, uint64_t *keys);
/* Write the keys of `count` views of each sample, from number `first` on, to `views` (n, count). View 0 has the sample's
 * own key. */
DT_API void dt_view_keys(const uint64_t *keys, int64_t n, int64_t first, int64_t count, uint64_t *views);
/* Write draws `first` to `first` + `count` - 1 of each key to `values` (n, count). */
DT_API void dt_uniforms(const uint64_t *keys, int64_t n, int64_t first, int64_t count, double *values);
/* Write each sample's crop to `boxes` (n, 4); `scale` and `ratio` are pairs. */
DT_API void dt_random_resized_crops(const uint64_t *keys, const int64_t *heights, const int64_t *widths, int64_t n,
                                    const double *scale, const double *ratio, int64_t *boxes);

/* ---- load.c: a worker's share of a batch ---- */

/* Methods of resizing. DT_BILINEAR is fast: of JPEGs decoded at a smaller size, with weights of 8 bits. DT_PILLOW is
 * bilinear in evaluation: decoded at their own size, with Pillow's bits. */
enum { DT_BILINEAR = 0, DT_AREA = 1, DT_SHIFT = 2, DT_BICUBIC = 3, DT_NEAREST = 4, DT_PILLOW = 5 };
/* Types of numbers. */
enum { DT_UINT8 = 0, DT_FLOAT32 = 1, DT_BFLOAT16 = 2 };

/* Where the samples are: each (N) in file order. Mode 0 is a JPEG, 1 raw pixels. */
typedef struct {
    const int32_t *descriptors, *modes;
    const uint16_t *widths, *heights;
    const uint64_t *pointers, *sizes;
    int64_t channels, bytes; /* bytes of each value; JPEGs have 3 channels of 1 byte */
} dt_samples;

/* What becomes of every sample of a loader. */
typedef struct {
    int64_t height, width; /* of the images */
    int32_t method, dtype;
    int64_t channels, bytes;         /* of the samples */
    const float *factors, *summands; /* (channels · width) each, for float32; of other images than RGB, also for bfloat16 */
    const uint16_t *table;           /* (3, 256), for bfloat16 of RGB */
    int64_t cut;                     /* side of the square that is cut out; 0: none */
    uint8_t fill[8];                 /* a pixel */
} dt_settings;

/* What was drawn for each of m images; NULL where nothing is. */
typedef struct {
    const int64_t *boxes;      /* (m, 4): top, left, height, width */
    const uint8_t *flips;      /* (m) */
    const double *colors;      /* (m, 4) */
    const int64_t *corners;    /* (m, 2) */
    int64_t chains, steps;     /* of a policy */
    const int64_t *operations; /* (m, chains, steps) */
    const double *magnitudes;
    const float *weights; /* (m, 1 + chains) */
    const int64_t *places; /* (m, 4): where in the output each crop goes, as in `boxes`; NULL: everywhere */
} dt_choices;

/* The images of one size that are made of each sample: `views` of them, from one decoding. */
typedef struct {
    const dt_settings *settings;
    const dt_choices *choices; /* of n · views images */
    int64_t views;
    void *images; /* (n, views, height, width, channels) of the dtype */
} dt_views;

/* A thread's working memory. */
typedef struct dt_workspace dt_workspace;
DT_API dt_workspace *dt_workspace_new(void);
DT_API void dt_workspace_free(dt_workspace *workspace);

/* The bytes that a workspace has after the loading of any of n samples, with any crops, into the images of `count` groups,
 * of whose views it reads the settings only, and that there is a policy if there are `choices`; without what places their
 * parts (`dt_choices.places`). A JPEG's coefficients, which libjpeg keeps only while it reads one with several scans, are
 * not among them. */
DT_API uint64_t dt_workspace_bytes(const dt_samples *samples, int64_t n, const dt_views *groups, int64_t count);

/* Load n samples into the images of `count` groups of views; `status` (n) receives each sample's, and `crcs` (n), unless
 * it is NULL, the CRC-32 of what is stored. */
DT_API void dt_load(dt_workspace *w, const dt_samples *samples, const int64_t *indices, int64_t n, const dt_views *groups,
                    int64_t count, const dt_limits *limits, uint32_t *crcs, int32_t *status);

/* As `dt_load`, of one picture, which is stored in memory; `samples` has its size and number of bytes. Returns its status. */
DT_API int dt_load_picture(dt_workspace *w, const dt_samples *samples, const uint8_t *stored, const dt_views *group,
                           const dt_limits *limits);

/* The second half of `dt_load`, for n images whose bytes Python has changed in between: `levels` (n, height, width,
 * channels). */
DT_API void dt_finish(const dt_settings *settings, const dt_choices *choices, int64_t n, uint8_t *levels, void *images);

#endif
