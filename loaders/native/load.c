/* A worker's share of a batch, in one call: read, decode the crop, resize, mirror, recolor, cut out, normalize. */
#include "core.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A thread's working memory. */
struct dt_workspace {
    dt_buffer file, pixels, image, policy, area, placed;
    dt_resizing resizing;
};

DT_API void dt_interface(int64_t *values)
{
    int64_t all[] = {DT_INTERFACE,       sizeof(dt_samples), sizeof(dt_settings),
                     sizeof(dt_choices), sizeof(dt_views),   sizeof(dt_limits)};
    memcpy(values, all, sizeof all);
}

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
static int read_all(int file, uint64_t start, size_t size, const dt_limits *limits, uint8_t *target)
{
    const size_t most = 1 << 26; /* in one call, which cannot be stopped */
    for (size_t done = 0; done < size;) {
        if (dt_is_stopped(limits))
            return DT_STOPPED;
        ssize_t got = pread(file, target + done, size - done < most ? size - done : most, (off_t)(start + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return DT_UNREADABLE;
        done += (size_t)got;
    }
    return DT_OK;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Whether images have three channels of bytes: the usual ones, with the fastest code and all operations. */
static int is_rgb(const dt_settings *settings) { return settings->channels == 3 && settings->bytes == 1; }

static size_t pixel_of(const dt_settings *settings) { return (size_t)(settings->channels * settings->bytes); }

/* Whether the settings are for these samples, and have no operation that such images do not. */
static int is_possible(const dt_views *group, const dt_samples *samples, int is_jpeg)
{
    const dt_settings *settings = group->settings;
    if (settings->channels != samples->channels || settings->bytes != samples->bytes)
        return 0;
    if (is_rgb(settings))
        return 1;
    return settings->channels >= 1 && settings->channels <= 4 && (settings->bytes == 1 || settings->bytes == 2) &&
           !is_jpeg && settings->method != DT_AREA && (settings->dtype != DT_UINT8 || settings->bytes == 1) &&
           group->choices->colors == NULL && group->choices->operations == NULL;
}

/* The largest denominator of a JPEG's scale at which a crop still has the target's pixels each way: libjpeg decodes
 * directly at that scale, in less time, and the remaining resize is by less than a half. */
static int denominator(const int64_t *box, int64_t height, int64_t width)
{
    for (int share = 8; share > 1; share /= 2)
        if (box[2] >= share * height && box[3] >= share * width)
            return share;
    return 1;
}

/* Whether a crop lies within the picture and has pixels. */
static int is_inside(const int64_t *box, int64_t height, int64_t width)
{
    return box[0] >= 0 && box[1] >= 0 && box[2] > 0 && box[3] > 0 && box[0] <= height - box[2] && box[1] <= width - box[3];
}

/* The pixels that a crop touches in a picture of `height` × `width`, decoded at 1/`share` of its size. */
static dt_region touched(const int64_t *box, int share, int64_t height, int64_t width)
{
    return (dt_region){box[0] / share, box[1] / share,
                       smaller((box[0] + box[2] + share - 1) / share, (height + share - 1) / share),
                       smaller((box[1] + box[3] + share - 1) / share, (width + share - 1) / share)};
}

/* Where the crop of the k-th image of a group goes: `output`, unless places were chosen. */
static const int64_t *place_of(const dt_views *group, int64_t k, const int64_t *output)
{
    return group->choices->places == NULL ? output : group->choices->places + 4 * k;
}

/* What is decoded of a sample for all of its images. */
typedef struct {
    int share, fast; /* the denominator of the scale; whether with libjpeg's fast inverse DCT */
    int64_t box[4];  /* around all crops */
} dt_plan;

/* Plan the i-th sample's decoding. Returns DT_OK, or DT_WRONG_SIZE for crops that do not lie within the picture, and for
 * images that the settings are not for. */
static int plan(const dt_views *groups, int64_t count, const dt_samples *samples, int64_t i, int is_jpeg, int64_t height,
                int64_t width, dt_plan *made)
{
    int64_t top = height, left = width, bottom = 0, right = 0, whole[4] = {0, 0, height, width};
    *made = (dt_plan){.share = is_jpeg ? 8 : 1};
    for (const dt_views *group = groups; group < groups + count; group++) {
        const dt_settings *settings = group->settings;
        if (!is_possible(group, samples, is_jpeg))
            return DT_WRONG_SIZE;
        int64_t output[4] = {0, 0, settings->height, settings->width};
        int shifts = settings->method == DT_SHIFT;
        if (shifts && (height != settings->height || width != settings->width))
            return DT_WRONG_SIZE;
        for (int64_t view = 0; view < group->views; view++) {
            const int64_t *box = shifts ? whole : group->choices->boxes + 4 * (i * group->views + view);
            if (!is_inside(box, height, width))
                return DT_WRONG_SIZE;
            top = smaller(top, box[0]), left = smaller(left, box[1]);
            bottom = dt_larger(bottom, box[0] + box[2]), right = dt_larger(right, box[1] + box[3]);
            const int64_t *place = place_of(group, i * group->views + view, output);
            if (place != output && (shifts || !is_inside(place, settings->height, settings->width)))
                return DT_WRONG_SIZE;
            int share = settings->method == DT_BILINEAR ? denominator(box, place[2], place[3]) : 1;
            made->share = share < made->share ? share : made->share;
        }
        made->fast |= settings->method == DT_AREA;
    }
    int64_t box[4] = {top, left, bottom - top, right - left};
    memcpy(made->box, box, sizeof box);
    return DT_OK;
}

/* Read what is stored of a sample: from its file, unless it is in memory, at `given`. */
static int fetch(dt_workspace *w, const dt_samples *samples, int64_t index, const uint8_t *given, const dt_limits *limits,
                 uint32_t *crc)
{
    size_t size = samples->sizes[index];
    uint8_t *bytes = dt_reserve(&w->file, size);
    if (bytes == NULL)
        return DT_NO_MEMORY;
    int status = DT_OK;
    if (given != NULL)
        memcpy(bytes, given, size);
    else
        status = read_all(samples->descriptors[index], samples->pointers[index], size, limits, bytes);
    if (crc != NULL && status == DT_OK)
        *crc = dt_crc32(0, bytes, size);
    return status;
}

/* Decode what lies in the plan's box of a sample that was fetched. */
static int decode(dt_workspace *w, const dt_samples *samples, int64_t index, const dt_plan *planned,
                  const dt_limits *limits, dt_image *image)
{
    const int64_t *box = planned->box;
    const uint8_t *bytes = w->file.data;
    size_t size = samples->sizes[index];
    int64_t height = samples->heights[index], width = samples->widths[index];
    if (samples->modes[index] != 0) {
        int64_t pixel = samples->channels * samples->bytes;
        if (size < (size_t)(height * width * pixel))
            return DT_WRONG_SIZE;
        *image = (dt_image){bytes + pixel * (box[0] * width + box[1]), (size_t)(pixel * width), box[2], box[3]};
        return DT_OK;
    }
    return dt_decode((dt_jpeg){bytes, size, height, width}, planned->share, planned->fast,
                     touched(box, planned->share, height, width), limits, &w->pixels, image);
}

/* The part of the decoded picture that one crop touches. */
static dt_image part_of(dt_image image, size_t pixel, const dt_plan *planned, const int64_t *box, int64_t height,
                        int64_t width)
{
    dt_region all = touched(planned->box, planned->share, height, width);
    dt_region own = touched(box, planned->share, height, width);
    image.data += (size_t)(own.top - all.top) * image.stride + pixel * (size_t)(own.left - all.left);
    image.rows = own.bottom - own.top;
    image.columns = own.right - own.left;
    return image;
}

/* Copy a crop of the target's own size. */
static void copy(dt_image image, size_t pixel, uint8_t *target)
{
    size_t line = pixel * (size_t)image.columns;
    for (int64_t y = 0; y < image.rows; y++, target += line)
        memcpy(target, image.data + (size_t)y * image.stride, line);
}

/* Resize and mirror a crop, which has been decoded at 1/`share` of its size, to `target` (`height`, `width`). */
static int resize(dt_workspace *w, const dt_settings *settings, dt_image image, const int64_t *box, int share, int flip,
                  uint8_t *target, int64_t height, int64_t width)
{
    double scale = share;
    size_t pixel = pixel_of(settings);
    int status = DT_OK;
    if (settings->method == DT_SHIFT)
        dt_shifted_copy(image, pixel, box[0], box[1], target);
    else if (box[2] == height && box[3] == width)
        copy(image, pixel, target);
    else if (settings->method == DT_NEAREST)
        status = dt_resize_nearest(image, pixel, target, height, width, &w->resizing);
    else if (!is_rgb(settings))
        status = dt_planes_resize(image, settings->channels, settings->bytes, settings->method == DT_BICUBIC,
                                  settings->method != DT_BILINEAR, target, height, width, &w->resizing);
    else if (settings->method == DT_BILINEAR)
        return dt_resize(image, (double)box[0] / scale, (double)box[1] / scale, (double)box[2] / scale,
                         (double)box[3] / scale, flip, target, height, width, &w->resizing);
    else if (settings->method == DT_BICUBIC || settings->method == DT_PILLOW)
        return dt_resize_finely(image, settings->method == DT_BICUBIC, flip, target, height, width, &w->resizing);
    else {
        size_t bytes = dt_area_bytes(image.rows, image.columns, height, width);
        status = dt_area(image.data, image.stride, image.rows, image.columns, w->resizing.limits, target, height, width,
                         dt_reserve(&w->area, bytes), bytes);
    }
    if (flip && status == DT_OK)
        dt_flip(target, pixel, height, width);
    return status;
}

/* Resize a crop to its place in `output`, fill what is around it, and mirror the whole. */
static int put(dt_workspace *w, const dt_settings *settings, dt_image image, const int64_t *box, int share, int flip,
               uint8_t *output, const int64_t *place)
{
    size_t pixel = pixel_of(settings), whole = pixel * (size_t)settings->width, line = pixel * (size_t)place[3];
    uint8_t *part = dt_reserve(&w->placed, line * (size_t)place[2]);
    if (part == NULL)
        return DT_NO_MEMORY;
    int status = resize(w, settings, image, box, share, 0, part, place[2], place[3]);
    if (status != DT_OK)
        return status;
    for (size_t x = 0; x < whole; x += pixel)
        memcpy(output + x, settings->fill, pixel);
    for (size_t y = 1; y < (size_t)settings->height; y++)
        memcpy(output + y * whole, output, whole);
    uint8_t *target = output + (size_t)place[0] * whole + pixel * (size_t)place[1];
    for (size_t y = 0; y < (size_t)place[2]; y++)
        memcpy(target + y * whole, part + y * line, line);
    if (flip)
        dt_flip(output, pixel, settings->height, settings->width);
    return DT_OK;
}

/* Recolor the i-th image. */
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
    int64_t pixels = settings->height * settings->width, at = settings->channels * pixels * i;
    if (choices->corners != NULL)
        dt_cut_out(image, pixel_of(settings), settings->width, choices->corners[2 * i], choices->corners[2 * i + 1],
                   settings->cut, settings->fill);
    if (settings->dtype == DT_BFLOAT16 && is_rgb(settings))
        dt_look_up(image, pixels, settings->table, (uint16_t *)images + at);
    else if (settings->dtype != DT_UINT8)
        dt_planes_normalize(image, settings->bytes, settings->height, settings->channels * settings->width,
                            settings->factors, settings->summands, settings->dtype == DT_BFLOAT16,
                            (uint8_t *)images + at * (settings->dtype == DT_BFLOAT16 ? 2 : 4));
}

/* Make the k-th image of a group from its sample's decoded picture. */
static int make(dt_workspace *w, const dt_views *group, int64_t k, dt_image picture, const dt_plan *planned, int64_t height,
                int64_t width)
{
    const dt_settings *settings = group->settings;
    const dt_choices *choices = group->choices;
    const int64_t *box = choices->boxes + 4 * k;
    size_t pixel = pixel_of(settings), bytes = pixel * (size_t)settings->height * (size_t)settings->width;
    uint8_t *image = settings->dtype == DT_UINT8 ? (uint8_t *)group->images + bytes * (size_t)k : dt_reserve(&w->image, bytes);
    if (image == NULL)
        return DT_NO_MEMORY;
    dt_image part = settings->method == DT_SHIFT ? picture : part_of(picture, pixel, planned, box, height, width);
    int status = choices->places == NULL
                     ? resize(w, settings, part, box, planned->share, choices->flips[k], image, settings->height, settings->width)
                     : put(w, settings, part, box, planned->share, choices->flips[k], image, choices->places + 4 * k);
    if (status == DT_OK)
        status = recolor(w, settings, choices, k, image);
    if (status == DT_OK)
        finish(settings, choices, k, image, group->images);
    return status;
}

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

static dt_resizing_bytes resize_bytes(const dt_settings *settings, int64_t height, int64_t width)
{
    if (settings->method == DT_SHIFT || (settings->method == DT_AREA && is_rgb(settings)))
        return (dt_resizing_bytes){0};
    if (settings->method == DT_NEAREST)
        return dt_resize_nearest_bytes(settings->height, settings->width);
    if (!is_rgb(settings))
        return dt_planes_resize_bytes(height, width, settings->channels, settings->bytes, settings->method == DT_BICUBIC,
                                      settings->method != DT_BILINEAR, settings->height, settings->width);
    if (settings->method == DT_BICUBIC || settings->method == DT_PILLOW)
        return dt_resize_finely_bytes(height, width, settings->method == DT_BICUBIC, settings->height, settings->width);
    return dt_resize_bytes(height, width, settings->height, settings->width);
}

/* The lines that libjpeg keeps while it decodes: of blocks, of enlarged chroma, and of colors. */
static size_t line_bytes(int64_t width) { return 64 * (size_t)width; }

DT_API uint64_t dt_workspace_bytes(const dt_samples *samples, int64_t n, const dt_views *groups, int64_t count)
{
    size_t file = 0, pixels = 0, area = 0, image = 0, policy = 0;
    dt_resizing_bytes resizing = {0};
    for (int64_t i = 0; i < n; i++) {
        int64_t height = samples->heights[i], width = samples->widths[i];
        file = most(file, samples->sizes[i]);
        if (samples->modes[i] == 0)
            pixels = most(pixels, 3 * (size_t)height * (size_t)width + line_bytes(width));
        for (const dt_views *group = groups; group < groups + count; group++) {
            const dt_settings *settings = group->settings;
            dt_resizing_bytes own = resize_bytes(settings, height, width);
            resizing = (dt_resizing_bytes){most(resizing.first, own.first),     most(resizing.weights, own.weights),
                                           most(resizing.exact, own.exact),     most(resizing.rows, own.rows),
                                           most(resizing.columns, own.columns), most(resizing.turned, own.turned)};
            if (settings->method == DT_AREA)
                area = most(area, dt_area_bytes(height, width, settings->height, settings->width));
        }
    }
    for (const dt_views *group = groups; group < groups + count; group++) {
        const dt_settings *settings = group->settings;
        image = most(image, pixel_of(settings) * (size_t)settings->height * (size_t)settings->width);
        if (group->choices != NULL)
            policy = most(policy, dt_augment_bytes(settings->height, settings->width));
    }
    return (uint64_t)file + pixels + area + image + policy + resizing.first + resizing.weights + resizing.exact +
           resizing.rows + resizing.columns + resizing.turned;
}

/* Load sample `index`, the i-th of what was drawn; `given` and `crc` as in `fetch`. */
static int load(dt_workspace *w, const dt_samples *samples, int64_t index, const uint8_t *given, int64_t i,
                const dt_views *groups, int64_t count, const dt_limits *limits, uint32_t *crc)
{
    int64_t height = samples->heights[index], width = samples->widths[index];
    dt_plan planned;
    dt_image picture;
    if (dt_is_stopped(limits))
        return DT_STOPPED;
    w->resizing.limits = limits;
    int status = plan(groups, count, samples, i, samples->modes[index] == 0, height, width, &planned);
    if (status == DT_OK)
        status = fetch(w, samples, index, given, limits, crc);
    if (status == DT_OK)
        status = decode(w, samples, index, &planned, limits, &picture);
    for (const dt_views *group = groups; group < groups + count; group++)
        for (int64_t view = 0; view < group->views && status == DT_OK; view++)
            status = make(w, group, i * group->views + view, picture, &planned, height, width);
    w->resizing.limits = NULL;
    return dt_is_stopped(limits) ? DT_STOPPED : status; /* resizes that are stopped return as if they were not */
}

DT_API void dt_load(dt_workspace *w, const dt_samples *samples, const int64_t *indices, int64_t n, const dt_views *groups,
                    int64_t count, const dt_limits *limits, uint32_t *crcs, int32_t *status)
{
    for (int64_t i = 0; i < n; i++)
        status[i] = load(w, samples, indices[i], NULL, i, groups, count, limits, crcs == NULL ? NULL : crcs + i);
}

DT_API int dt_load_picture(dt_workspace *w, const dt_samples *samples, const uint8_t *stored, const dt_views *group,
                           const dt_limits *limits)
{
    return load(w, samples, 0, stored, 0, group, 1, limits, NULL);
}

DT_API void dt_finish(const dt_settings *settings, const dt_choices *choices, int64_t n, uint8_t *levels, void *images)
{
    size_t bytes = pixel_of(settings) * (size_t)settings->height * (size_t)settings->width;
    for (int64_t i = 0; i < n; i++)
        finish(settings, choices, i, levels + bytes * (size_t)i, images);
}
