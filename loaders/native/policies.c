/* The operations of the augmentation policies.
 *
 * Arithmetic is Pillow's: RandAugment and TrivialAugment give exactly torchvision's images for the same draws,
 * ThreeAugment those of Pillow's operations. For
 * AugMix torchvision works on tensors with bilinear interpolation, and so does this; its colors are Pillow's, up to 1
 * level from torchvision's.
 */
#include "core.h"

#include <math.h>
#include <string.h>

enum {
    IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, COLOR, CONTRAST, SHARPNESS,
    POSTERIZE, SOLARIZE, AUTO_CONTRAST, EQUALIZE, GAUSSIAN_BLUR
};

typedef struct {
    uint8_t *image, *before; /* (height, width, 3); `before` is working memory */
    int64_t height, width;
    int tensor; /* as torchvision does for tensors, else as for Pillow's images */
} picture;

/* A pixel (x, y) comes from (a·x + b·y + c, d·x + e·y + f). */
typedef struct {
    double a, b, c, d, e, f;
} source;

static source find_source(int64_t operation, double magnitude, int64_t height, int64_t width)
{
    switch (operation) {
    case SHEAR_X:
        return (source){1, magnitude, 0, 0, 1, 0};
    case SHEAR_Y:
        return (source){1, 0, 0, magnitude, 1, 0};
    case TRANSLATE_X:
        return (source){1, 0, -trunc(magnitude), 0, 1, 0};
    case TRANSLATE_Y:
        return (source){1, 0, 0, 0, 1, -trunc(magnitude)};
    default: {
        double angle = magnitude * (3.14159265358979323846 / 180.0), cosine = cos(angle), sine = sin(angle);
        double x = (double)width / 2, y = (double)height / 2;
        return (source){cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y};
    }
    }
}

/* Fill the image with the nearest pixels of `before`, black outside of it. Pillow steps through the source in 16 bits of
 * fraction, from the center of the first pixel. */
static void move(picture p, source s)
{
    int64_t right_x = (int64_t)floor(s.a * 65536 + 0.5), right_y = (int64_t)floor(s.d * 65536 + 0.5);
    int64_t down_x = (int64_t)floor(s.b * 65536 + 0.5), down_y = (int64_t)floor(s.e * 65536 + 0.5);
    int64_t start_x = (int64_t)floor((s.c + s.a * 0.5 + s.b * 0.5) * 65536 + 0.5);
    int64_t start_y = (int64_t)floor((s.f + s.d * 0.5 + s.e * 0.5) * 65536 + 0.5);
    uint8_t *out = p.image;
    for (int64_t y = 0; y < p.height; y++)
        for (int64_t x = 0; x < p.width; x++, out += 3) {
            int64_t from_x = (start_x + y * down_x + x * right_x) >> 16;
            int64_t from_y = (start_y + y * down_y + x * right_y) >> 16;
            if (from_x >= 0 && from_x < p.width && from_y >= 0 && from_y < p.height)
                memcpy(out, p.before + 3 * (from_y * p.width + from_x), 3);
            else
                memset(out, 0, 3);
        }
}

/* The two pixels that a position on one axis lies between, and their weights; 0 for one outside. */
typedef struct {
    int64_t first, second;
    float of_first, of_second;
} neighbours;

static neighbours find_neighbours(double at, int64_t size)
{
    int64_t first = (int64_t)floor(at), last = size - 1;
    float share = (float)(at - (double)first);
    neighbours found = {first, first + 1, 0.0f, 0.0f};
    if (first >= 0 && first < size)
        found.of_first = 1.0f - share;
    if (first + 1 >= 0 && first + 1 < size)
        found.of_second = share;
    found.first = found.first < 0 ? 0 : found.first > last ? last : found.first;
    found.second = found.second < 0 ? 0 : found.second > last ? last : found.second;
    return found;
}

/* As `move`, but bilinear; pixels outside of `before` are black in the interpolation too. */
static void move_smoothly(picture p, source s)
{
    uint8_t *out = p.image;
    for (int64_t y = 0; y < p.height; y++)
        for (int64_t x = 0; x < p.width; x++) {
            double to_x = (double)x + 0.5, to_y = (double)y + 0.5;
            neighbours columns = find_neighbours(s.a * to_x + s.b * to_y + s.c - 0.5, p.width);
            neighbours lines = find_neighbours(s.d * to_x + s.e * to_y + s.f - 0.5, p.height);
            const uint8_t *top = p.before + 3 * lines.first * p.width, *bottom = p.before + 3 * lines.second * p.width;
            for (int k = 0; k < 3; k++) {
                int64_t left = 3 * columns.first + k, right = 3 * columns.second + k;
                float upper = columns.of_first * (float)top[left] + columns.of_second * (float)top[right];
                float lower = columns.of_first * (float)bottom[left] + columns.of_second * (float)bottom[right];
                *out++ = (uint8_t)rintf(lines.of_first * upper + lines.of_second * lower);
            }
        }
}

/* Blend each pixel with its smoothed value: itself five times and its 8 neighbours, over 13. Edge pixels are unchanged.
 * The smoothed value is rounded; halves do not occur in thirteenths. */
static void sharpen(picture p, float factor)
{
    int64_t width = p.width * 3;
    for (int64_t y = 0; y < p.height - 2; y++) {
        const uint8_t *above = p.before + y * width, *line = above + width, *below = line + width;
        uint8_t *out = p.image + (y + 1) * width + 3;
        for (int64_t x = 0; x < width - 6; x++) {
            int total = 4 * line[x + 3];
            for (int column = 0; column < 9; column += 3)
                total += above[x + column] + line[x + column] + below[x + column];
            float smoothed = floorf((float)total * (float)(1.0 / 13) + 0.5f);
            out[x] = dt_blend(smoothed, line[x + 3], factor);
        }
    }
}

/* Weights, with 24 bits after the point, of a pixel, its neighbours and theirs. Pillow approximates a Gaussian by three
 * boxes whose ends count in part (Gwosdek et al. 2011, "Theoretical foundations of Gaussian convolution by extended box
 * filtering"); up to a standard deviation of 2.4 they reach two pixels. */
typedef struct {
    uint32_t own, near, far;
} box;

static box find_box(float sigma)
{
    float variance = sigma * sigma / 3; /* of each box */
    float length = (float)sqrt(12.0 * (double)variance + 1.0), whole = (float)floor(((double)length - 1.0) / 2.0);
    float part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance);
    part /= 6 * (variance - (whole + 1) * (whole + 1));
    uint32_t one = 1 << 24, inner = (uint32_t)((float)one / ((whole + part) * 2 + 1));
    uint32_t end = (one - (2 * (uint32_t)whole + 1) * inner) / 2;
    return whole > 0 ? (box){inner, inner, end} : (box){inner, end, 0};
}

/* Weigh five lines of bytes, of which the middle one is the box's own. */
DT_CLONES static void weigh(const uint8_t *const *lines, box box, int64_t bytes, uint8_t *restrict out)
{
    const uint8_t *a = lines[0], *b = lines[1], *c = lines[2], *d = lines[3], *e = lines[4];
    for (int64_t i = 0; i < bytes; i++) {
        uint32_t sum = box.own * c[i] + box.near * ((uint32_t)b[i] + d[i]) + box.far * ((uint32_t)a[i] + e[i]);
        out[i] = (uint8_t)((sum + (1 << 23)) >> 24);
    }
}

static int64_t clamp(int64_t at, int64_t size) { return at < 0 ? 0 : at < size ? at : size - 1; }

/* Pixels outside of the image are those of its edge. `before` has room for a line that is longer by four pixels. */
static void blur(picture p, double sigma)
{
    if (!(sigma > 0))
        return;
    box box = find_box((float)(sigma < 2.4 ? sigma : 2.4));
    int64_t width = 3 * p.width;
    const uint8_t *lines[5];
    for (int k = 0; k < 5; k++)
        lines[k] = p.before + 3 * k;
    for (uint8_t *line = p.image, *end = line + p.height * width; line < end; line += width)
        for (int pass = 0; pass < 3; pass++) {
            memcpy(p.before + 6, line, (size_t)width);
            for (int k = 0; k < 2; k++) {
                memcpy(p.before + 3 * k, line, 3);
                memcpy(p.before + 6 + width + 3 * k, line + width - 3, 3);
            }
            weigh(lines, box, width, line);
        }
    for (int pass = 0; pass < 3; pass++) {
        memcpy(p.before, p.image, (size_t)(p.height * width));
        for (int64_t y = 0; y < p.height; y++) {
            for (int k = 0; k < 5; k++)
                lines[k] = p.before + clamp(y + k - 2, p.height) * width;
            weigh(lines, box, width, p.image + y * width);
        }
    }
}

typedef uint8_t table[3][256];

/* The table that maps a channel's darkest level to 0 and its brightest to 255. */
static void stretch(const int64_t *counts, uint8_t *table)
{
    int low = 0, high = 255;
    while (counts[low] == 0)
        low++;
    while (counts[high] == 0)
        high--;
    double scale = high > low ? 255.0 / (high - low) : 1.0, offset = high > low ? -low * scale : 0.0;
    for (int level = 0; level < 256; level++) {
        int value = (int)(level * scale + offset);
        table[level] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

/* The table that makes all levels of a channel about equally frequent. */
static void flatten(const int64_t *counts, uint8_t *table)
{
    int64_t total = 0, brightest = 0;
    for (int level = 0; level < 256; level++) {
        total += counts[level];
        brightest = counts[level] ? counts[level] : brightest;
    }
    int64_t step = (total - brightest) / 255, below = step / 2;
    for (int level = 0; level < 256; level++) {
        int64_t value = step ? below / step : level;
        table[level] = (uint8_t)(value < 255 ? value : 255);
        below += counts[level];
    }
}

static void tabulate_by_counts(picture p, int64_t operation, table table)
{
    int64_t counts[3][256] = {{0}}, bytes = 3 * p.height * p.width;
    for (int64_t i = 0; i < bytes; i += 3)
        for (int k = 0; k < 3; k++)
            counts[k][p.image[i + k]]++;
    for (int k = 0; k < 3; k++)
        (operation == AUTO_CONTRAST ? stretch : flatten)(counts[k], table[k]);
}

static uint8_t new_level(int64_t operation, double magnitude, float base, int tensor, int level)
{
    if (operation == POSTERIZE)
        return (uint8_t)(level & ~((1 << (8 - (int)magnitude)) - 1));
    if (operation == SOLARIZE) {
        /* A threshold slightly above an integer level, as float32's thirds are, counts in torch, but not in Pillow. */
        double threshold = tensor ? (double)(float)(255.0 * magnitude) : 255.0 * magnitude;
        return (uint8_t)(level < threshold ? level : 255 - level);
    }
    return dt_blend(base, (float)level, (float)(1.0 + magnitude));
}

/* Operations that map each level of each channel to a new one. */
static void map_levels(picture p, int64_t operation, double magnitude)
{
    table table;
    if (operation == AUTO_CONTRAST || operation == EQUALIZE) {
        tabulate_by_counts(p, operation, table);
    } else {
        float base = operation == CONTRAST ? (float)dt_mean_gray(p.image, p.height * p.width) : 0.0f;
        for (int level = 0; level < 256; level++)
            table[0][level] = new_level(operation, magnitude, base, p.tensor, level);
        memcpy(table[1], table[0], 256);
        memcpy(table[2], table[0], 256);
    }
    for (uint8_t *pixel = p.image, *end = pixel + 3 * p.height * p.width; pixel < end; pixel += 3)
        for (int k = 0; k < 3; k++)
            pixel[k] = table[k][pixel[k]];
}

static void operate(picture p, int64_t operation, double magnitude)
{
    if (operation == IDENTITY)
        return;
    if (operation <= ROTATE || operation == SHARPNESS)
        memcpy(p.before, p.image, (size_t)(3 * p.height * p.width));
    if (operation <= ROTATE)
        (p.tensor ? move_smoothly : move)(p, find_source(operation, magnitude, p.height, p.width));
    else if (operation == COLOR)
        dt_saturate(p.image, p.height * p.width, (float)(1.0 + magnitude));
    else if (operation == SHARPNESS)
        sharpen(p, (float)(1.0 + magnitude));
    else if (operation == GAUSSIAN_BLUR)
        blur(p, magnitude);
    else
        map_levels(p, operation, magnitude);
}

static void run_chain(picture p, const dt_policy *policy, int64_t chain)
{
    for (int64_t step = 0; step < policy->steps; step++) {
        int64_t at = chain * policy->steps + step;
        operate(p, policy->operations[at], policy->magnitudes[at]);
    }
}

static void add(float *sums, const uint8_t *levels, size_t bytes, float weight)
{
    for (size_t i = 0; i < bytes; i++)
        sums[i] += weight * (float)levels[i];
}

/* Of the sums, then the untouched image, and `before`. */
size_t dt_augment_bytes(int64_t height, int64_t width) { return 3 * (size_t)height * (size_t)width * 6; }

int dt_augment(uint8_t *image, int64_t height, int64_t width, const dt_policy *policy, dt_buffer *memory)
{
    size_t bytes = 3 * (size_t)height * (size_t)width;
    float *sums = dt_reserve(memory, dt_augment_bytes(height, width));
    if (sums == NULL)
        return DT_NO_MEMORY;
    uint8_t *plain = (uint8_t *)(sums + bytes);
    picture p = {image, plain + bytes, height, width, policy->weights != NULL};
    if (policy->weights == NULL) {
        run_chain(p, policy, 0);
        return DT_OK;
    }
    memcpy(plain, image, bytes);
    memset(sums, 0, bytes * sizeof *sums);
    add(sums, plain, bytes, policy->weights[0]);
    for (int64_t chain = 0; chain < policy->chains; chain++) {
        memcpy(image, plain, bytes);
        run_chain(p, policy, chain);
        add(sums, image, bytes, policy->weights[1 + chain]);
    }
    for (size_t i = 0; i < bytes; i++) /* truncated, not rounded, as in torchvision */
        image[i] = (uint8_t)(sums[i] < 255.0f ? sums[i] : 255.0f);
    return DT_OK;
}
