/* A worker's share of a batch, in one call: read, decode the crop, resize, mirror, recolour, cut out, normalise. */
#include "core.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BILINEAR = 0, AREA = 1, SHIFT = 2, BICUBIC = 3, NEAREST = 4 };
enum { UINT8 = 0, FLOAT32 = 1, BFLOAT16 = 2 };

/* Where the samples are: each (N) in file order. Mode 0 is a JPEG, 1 raw pixels. */
typedef struct {
    const int32_t *descriptors, *modes;
    const uint16_t *widths, *heights;
    const uint64_t *pointers, *sizes;
} dt_samples;

/* What becomes of every sample of a loader. */
typedef struct {
    int64_t height, width; /* of the images */
    int32_t method, dtype;
    const float *factors, *summands; /* (3 · width) each, for float32 */
    const uint16_t *table;           /* (3, 256), for bfloat16 */
    int64_t cut;                     /* side of the square that is cut out; 0: none */
    uint8_t fill[3];
} dt_settings;

/* What was drawn for each of n samples; NULL where nothing is. */
typedef struct {
    const int64_t *indices, *boxes; /* (n), (n, 4): top, left, height, width */
    const uint8_t *flips;           /* (n) */
    const double *colors;           /* (n, 4) */
    const int64_t *corners;         /* (n, 2) */
    int64_t chains, steps;          /* of a policy */
    const int64_t *operations;      /* (n, chains, steps) */
    const double *magnitudes;
    const float *weights; /* (n, 1 + chains) */
    uint32_t *crcs;       /* (n), receives the CRC-32 of each sample's stored image; NULL: not computed */
    const int64_t *places; /* (n, 4): where in the output each crop goes, as in `boxes`; NULL: everywhere */
} dt_choices;

/* A thread's working memory. */
typedef struct {
    dt_buffer file, pixels, image, policy, area, placed;
    dt_resizing resizing;
} dt_workspace;

DT_API dt_workspace *dt_workspace_new(void) { return calloc(1, sizeof(dt_workspace)); }

DT_API void dt_workspace_free(dt_workspace *workspace)
{
    if (workspace == NULL)
        return;
    dt_buffer *buffers[] = {&workspace->file, &workspace->pixels, &workspace->image, &workspace->policy, &workspace->area,
                            &workspace->placed,
                            &workspace->resizing.first, &workspace->resizing.weights, &workspace->resizing.exact,
                            &workspace->resizing.rows, &workspace->resizing.columns, &workspace->resizing.turned};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        dt_release(buffers[i]);
    free(workspace);
}

/* Read `size` bytes of a file. `pread`, because reading a memory map of a truncated file kills the process. */
static int read_all(int file, uint64_t start, size_t size, uint8_t *target)
{
    for (size_t done = 0; done < size;) {
        ssize_t got = pread(file, target + done, size - done, (off_t)(start + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return DT_UNREADABLE;
        done += (size_t)got;
    }
    return DT_OK;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The largest denominator of a JPEG's scale at which a crop still has the target's pixels each way: libjpeg decodes
 * directly at that scale, in less time, and the remaining resize is by less than a half. */
static int denominator(const int64_t *box, int64_t height, int64_t width)
{
    for (int share = 8; share > 1; share /= 2)
        if (box[2] >= share * height && box[3] >= share * width)
            return share;
    return 1;
}

/* Read a sample and decode what lies in its crop; `share` is the denominator of the scale. */
static int fetch(dt_workspace *w, const dt_samples *samples, int64_t index, const int64_t *box, int share, int fast,
                 uint32_t *crc, dt_image *image)
{
    size_t size = samples->sizes[index];
    int64_t height = samples->heights[index], width = samples->widths[index];
    uint8_t *bytes = dt_reserve(&w->file, size);
    if (bytes == NULL)
        return DT_NO_MEMORY;
    int status = read_all(samples->descriptors[index], samples->pointers[index], size, bytes);
    if (status != DT_OK)
        return status;
    if (crc != NULL)
        *crc = dt_crc32(0, bytes, size);
    if (samples->modes[index] != 0) {
        if (size < (size_t)(height * width * 3))
            return DT_WRONG_SIZE;
        *image = (dt_image){bytes + 3 * (box[0] * width + box[1]), 3 * (size_t)width, box[2], box[3]};
        return DT_OK;
    }
    dt_region wanted = {box[0] / share, box[1] / share, smaller((box[0] + box[2] + share - 1) / share, (height + share - 1) / share),
                        smaller((box[1] + box[3] + share - 1) / share, (width + share - 1) / share)};
    return dt_decode(bytes, size, height, width, share, fast, wanted, &w->pixels, image);
}

/* Copy a crop of the target's own size. */
static void copy(dt_image image, uint8_t *target)
{
    for (int64_t y = 0; y < image.rows; y++, target += 3 * image.columns)
        memcpy(target, image.data + (size_t)y * image.stride, 3 * (size_t)image.columns);
}

/* Whether a crop lies within the picture and has pixels. */
static int is_inside(const int64_t *box, int64_t height, int64_t width)
{
    return box[0] >= 0 && box[1] >= 0 && box[2] > 0 && box[3] > 0 && box[0] <= height - box[2] && box[1] <= width - box[3];
}

/* Resize and mirror a crop, which has been decoded at 1/`share` of its size, to `target` (`height`, `width`, 3). */
static int resize(dt_workspace *w, const dt_settings *settings, dt_image image, const int64_t *box, int share, int flip,
                  uint8_t *target, int64_t height, int64_t width)
{
    double scale = share;
    int status = DT_OK;
    if (settings->method == SHIFT)
        dt_shifted_copy(image, box[0], box[1], target);
    else if (box[2] == height && box[3] == width)
        copy(image, target);
    else if (settings->method == BILINEAR)
        return dt_resize(image, (double)box[0] / scale, (double)box[1] / scale, (double)box[2] / scale,
                         (double)box[3] / scale, flip, target, height, width, &w->resizing);
    else if (settings->method == BICUBIC)
        return dt_resize_bicubic(image, flip, target, height, width, &w->resizing);
    else if (settings->method == NEAREST)
        status = dt_resize_nearest(image, target, height, width, &w->resizing);
    else {
        size_t bytes = dt_area_bytes(image.rows, image.columns, height, width);
        status = dt_area(image.data, image.stride, image.rows, image.columns, target, height, width,
                         dt_reserve(&w->area, bytes), bytes);
    }
    if (flip && status == DT_OK)
        dt_flip(target, height, width);
    return status;
}

/* Resize a crop to its place in `output`, fill what is around it, and mirror the whole. */
static int put(dt_workspace *w, const dt_settings *settings, dt_image image, const int64_t *box, int share, int flip,
               uint8_t *output, const int64_t *place)
{
    size_t whole = 3 * (size_t)settings->width, line = 3 * (size_t)place[3];
    uint8_t *part = dt_reserve(&w->placed, line * (size_t)place[2]);
    if (part == NULL)
        return DT_NO_MEMORY;
    int status = resize(w, settings, image, box, share, 0, part, place[2], place[3]);
    if (status != DT_OK)
        return status;
    for (size_t x = 0; x < whole; x += 3)
        memcpy(output + x, settings->fill, 3);
    for (size_t y = 1; y < (size_t)settings->height; y++)
        memcpy(output + y * whole, output, whole);
    uint8_t *target = output + (size_t)place[0] * whole + 3 * (size_t)place[1];
    for (size_t y = 0; y < (size_t)place[2]; y++)
        memcpy(target + y * whole, part + y * line, line);
    if (flip)
        dt_flip(output, settings->height, settings->width);
    return DT_OK;
}

/* Write a sample's crop to `target`, resized and mirrored; `place` is where in it, NULL: everywhere. */
static int decode(dt_workspace *w, const dt_samples *samples, const dt_settings *settings, int64_t index,
                  const int64_t *box, const int64_t *place, int flip, uint32_t *crc, uint8_t *target)
{
    int64_t height = samples->heights[index], width = samples->widths[index];
    int64_t whole[4] = {0, 0, height, width};
    int shifts = settings->method == SHIFT;
    if (shifts ? height != settings->height || width != settings->width : !is_inside(box, height, width))
        return DT_WRONG_SIZE;
    if (place != NULL && (shifts || !is_inside(place, settings->height, settings->width)))
        return DT_WRONG_SIZE;
    int64_t out_height = place == NULL ? settings->height : place[2], out_width = place == NULL ? settings->width : place[3];
    int share = settings->method == BILINEAR && samples->modes[index] == 0 ? denominator(box, out_height, out_width) : 1;
    dt_image image;
    int status = fetch(w, samples, index, shifts ? whole : box, share, settings->method == AREA, crc, &image);
    if (status != DT_OK)
        return status;
    return place == NULL ? resize(w, settings, image, box, share, flip, target, out_height, out_width)
                         : put(w, settings, image, box, share, flip, target, place);
}

/* Recolour the i-th image. */
static int recolor(dt_workspace *w, const dt_settings *settings, const dt_choices *choices, int64_t i, uint8_t *image)
{
    if (choices->colors != NULL)
        dt_jitter_color(image, settings->height * settings->width, choices->colors + 4 * i);
    if (choices->operations == NULL)
        return DT_OK;
    int64_t at = i * choices->chains * choices->steps;
    dt_policy policy = {choices->chains, choices->steps, choices->operations + at, choices->magnitudes + at,
                        choices->weights == NULL ? NULL : choices->weights + i * (1 + choices->chains)};
    return dt_augment(image, settings->height, settings->width, &policy, &w->policy);
}

/* Cut out a square of the i-th image, and write it to the batch `images` as numbers of the dtype. */
static void finish(const dt_settings *settings, const dt_choices *choices, int64_t i, uint8_t *image, void *images)
{
    int64_t pixels = settings->height * settings->width, at = 3 * pixels * i;
    if (choices->corners != NULL)
        dt_cut_out(image, settings->width, choices->corners[2 * i], choices->corners[2 * i + 1], settings->cut,
                   settings->fill);
    if (settings->dtype == FLOAT32)
        dt_normalise(image, settings->height, settings->width, settings->factors, settings->summands,
                     (float *)images + at);
    else if (settings->dtype == BFLOAT16)
        dt_look_up(image, pixels, settings->table, (uint16_t *)images + at);
}

/* Load n samples into `images` (n, height, width, 3) of the dtype; `status` (n) receives each one's. */
DT_API void dt_load(dt_workspace *w, const dt_samples *samples, const dt_settings *settings, const dt_choices *choices,
                    int64_t n, void *images, int32_t *status)
{
    size_t bytes = 3 * (size_t)settings->height * (size_t)settings->width;
    for (int64_t i = 0; i < n; i++) {
        uint8_t *image = settings->dtype == UINT8 ? (uint8_t *)images + bytes * (size_t)i : dt_reserve(&w->image, bytes);
        status[i] = image == NULL ? DT_NO_MEMORY
                                  : decode(w, samples, settings, choices->indices[i], choices->boxes + 4 * i,
                                           choices->places == NULL ? NULL : choices->places + 4 * i, choices->flips[i],
                                           choices->crcs == NULL ? NULL : choices->crcs + i, image);
        if (status[i] == DT_OK)
            status[i] = recolor(w, settings, choices, i, image);
        if (status[i] == DT_OK)
            finish(settings, choices, i, image, images);
    }
}

/* The second half of `dt_load`, for images whose bytes Python has changed in between: `levels` (n, height, width, 3). */
DT_API void dt_finish(const dt_settings *settings, const dt_choices *choices, int64_t n, uint8_t *levels, void *images)
{
    size_t bytes = 3 * (size_t)settings->height * (size_t)settings->width;
    for (int64_t i = 0; i < n; i++)
        finish(settings, choices, i, levels + bytes * (size_t)i, images);
}
