/* The random draws of a sample: pure functions of (seed, epoch, sample), whatever thread, batch or rank handles it. */
#include "core.h"

#include <math.h>

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

/* SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection that avalanches. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Draw number `draw` of a key, uniform in [0, 1). */
static double uniform(uint64_t key, int64_t draw)
{
    return (double)(mix(key + (uint64_t)(draw + 1) * GOLDEN) >> 11) * (1.0 / 9007199254740992.0);
}

DT_API void dt_sample_keys(uint64_t seed, uint64_t epoch, const int64_t *indices, int64_t n, uint64_t *keys)
{
    uint64_t both = mix(mix(seed + GOLDEN) ^ (epoch + GOLDEN));
    for (int64_t i = 0; i < n; i++)
        keys[i] = mix(both ^ ((uint64_t)indices[i] + GOLDEN));
}

DT_API void dt_view_keys(const uint64_t *keys, int64_t n, int64_t first, int64_t count, uint64_t *views)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t view = first; view < first + count; view++)
            *views++ = view == 0 ? keys[i] : mix(keys[i] ^ mix((uint64_t)view + GOLDEN));
}

DT_API void dt_uniforms(const uint64_t *keys, int64_t n, int64_t first, int64_t count, double *values)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < count; k++)
            *values++ = uniform(keys[i], first + k);
}

/* Inception's crop: top, left, height and width; after ten tries, the center. The same distribution as torchvision's
 * `RandomResizedCrop.get_params`. Draws 0 to 39 of the key. */
static void random_resized_crop(uint64_t key, int64_t height, int64_t width, const double *scale, const double *ratio,
                                int64_t *box)
{
    double low = log(ratio[0]), high = log(ratio[1]);
    for (int64_t attempt = 0; attempt < 10; attempt++) {
        double share = scale[0] + (scale[1] - scale[0]) * uniform(key, 4 * attempt);
        double area = (double)(height * width) * share;
        double aspect = exp(low + (high - low) * uniform(key, 4 * attempt + 1));
        int64_t w = (int64_t)rint(sqrt(area * aspect)), h = (int64_t)rint(sqrt(area / aspect));
        if (w > 0 && w <= width && h > 0 && h <= height) {
            box[0] = (int64_t)(uniform(key, 4 * attempt + 2) * (double)(height - h + 1));
            box[1] = (int64_t)(uniform(key, 4 * attempt + 3) * (double)(width - w + 1));
            box[2] = h;
            box[3] = w;
            return;
        }
    }
    int64_t w = width, h = height;
    if ((double)width < ratio[0] * (double)height) {
        h = (int64_t)rint((double)width / ratio[0]);
        h = h > 1 ? h : 1;
    } else if ((double)width > ratio[1] * (double)height) {
        w = (int64_t)rint((double)height * ratio[1]);
        w = w > 1 ? w : 1;
    }
    box[0] = (height - h) / 2;
    box[1] = (width - w) / 2;
    box[2] = h;
    box[3] = w;
}

DT_API void dt_random_resized_crops(const uint64_t *keys, const int64_t *heights, const int64_t *widths, int64_t n,
                                    const double *scale, const double *ratio, int64_t *boxes)
{
    for (int64_t i = 0; i < n; i++)
        random_resized_crop(keys[i], heights[i], widths[i], scale, ratio, boxes + 4 * i);
}
