/* JPEG to pixels with libjpeg-turbo: only the part that is wanted, with errors caught. */
#include "jpeg_errors.h"

#include <string.h>

/* One for each picture: libjpeg keeps Huffman and quantisation tables from picture to picture, and a file that lacks its
 * own would be decoded with those of another. */
typedef struct {
    struct jpeg_decompress_struct jpeg;
    dt_jpeg_errors errors;
} decoder;

static void prepare(decoder *d)
{
    memset(&d->jpeg, 0, sizeof d->jpeg);
    d->jpeg.err = dt_catch_errors(&d->errors);
}

/* Read the header and choose how to decode; DT_WRONG_SIZE if the picture does not have `height` × `width` pixels. */
static int begin(decoder *d, const uint8_t *data, size_t size, int64_t height, int64_t width, int share,
                 int fast)
{
    j_decompress_ptr jpeg = &d->jpeg;
    jpeg_create_decompress(jpeg);
    dt_limit_scans(jpeg);
    jpeg_mem_src(jpeg, data, (unsigned long)size);
    jpeg_read_header(jpeg, TRUE);
    if (jpeg->image_height != height || jpeg->image_width != width)
        return DT_WRONG_SIZE;
    jpeg->scale_num = 1;
    jpeg->scale_denom = (unsigned)share;
    jpeg->out_color_space = JCS_EXT_RGB;
    jpeg->dct_method = fast ? JDCT_IFAST : JDCT_ISLOW;
    return DT_OK;
}

/* Begin to decode; leave out columns and lines outside of `wanted`. Returns the first column that is decoded.
 *
 * Where chroma is subsampled, libjpeg interpolates it between neighbours, and takes the first and last columns that it
 * decodes for the picture's edges: a further block on either side makes the wanted ones exact. Progressive pictures are
 * decoded in full width: where scans are missing, libjpeg smooths blocks by those two further. */
static JDIMENSION crop(j_decompress_ptr jpeg, dt_region wanted)
{
    jpeg_start_decompress(jpeg);
    JDIMENSION block = (JDIMENSION)(jpeg->max_h_samp_factor * jpeg->min_DCT_scaled_size);
    JDIMENSION first = (JDIMENSION)wanted.left / block * block;
    JDIMENSION end = ((JDIMENSION)wanted.right + block - 1) / block * block + block;
    first = first > block ? first - block : 0;
    end = end < jpeg->output_width ? end : jpeg->output_width;
    if (jpeg->progressive_mode)
        first = 0;
    else if (first > 0 || end < jpeg->output_width) {
        JDIMENSION columns = end - first;
        jpeg_crop_scanline(jpeg, &first, &columns);
    }
    if (wanted.top > 0)
        jpeg_skip_scanlines(jpeg, (JDIMENSION)wanted.top);
    return first;
}

/* Read the lines of `wanted`; at the picture's end, also what follows it, so that a missing end is noticed. */
static void read_lines(j_decompress_ptr jpeg, dt_region wanted, uint8_t *pixels, size_t stride)
{
    while (jpeg->output_scanline < wanted.bottom) {
        JSAMPROW rows[16];
        JDIMENSION left = (JDIMENSION)wanted.bottom - jpeg->output_scanline, count = left < 16 ? left : 16;
        for (JDIMENSION row = 0; row < count; row++)
            rows[row] = pixels + stride * (size_t)(jpeg->output_scanline - wanted.top + row);
        jpeg_read_scanlines(jpeg, rows, count);
    }
    if (jpeg->output_scanline == jpeg->output_height)
        jpeg_finish_decompress(jpeg);
}

int dt_decode(const uint8_t *data, size_t size, int64_t height, int64_t width, int share, int fast, dt_region wanted,
              dt_buffer *memory, dt_image *image)
{
    decoder d;
    prepare(&d);
    if (setjmp(d.errors.escape)) {
        jpeg_destroy_decompress(&d.jpeg);
        return d.errors.status;
    }
    d.errors.status = begin(&d, data, size, height, width, share, fast);
    if (d.errors.status == DT_OK) {
        JDIMENSION first = crop(&d.jpeg, wanted);
        size_t stride = (size_t)d.jpeg.output_width * 3;
        uint8_t *pixels = dt_reserve(memory, stride * (size_t)(wanted.bottom - wanted.top));
        if (pixels == NULL)
            d.errors.status = DT_NO_MEMORY;
        else {
            read_lines(&d.jpeg, wanted, pixels, stride);
            *image = (dt_image){pixels + 3 * (wanted.left - first), stride, wanted.bottom - wanted.top,
                                wanted.right - wanted.left};
        }
    }
    jpeg_destroy_decompress(&d.jpeg);
    return d.errors.status;
}

int dt_jpeg_check(const uint8_t *data, size_t size, int64_t height, int64_t width, int share, char *message)
{
    decoder d;
    prepare(&d);
    if (!setjmp(d.errors.escape)) {
        d.errors.status = begin(&d, data, size, height, width, share, 0);
        if (d.errors.status == DT_OK) {
            jpeg_start_decompress(&d.jpeg);
            JSAMPARRAY rows = d.jpeg.mem->alloc_sarray((j_common_ptr)&d.jpeg, JPOOL_IMAGE, d.jpeg.output_width * 3, 16);
            while (d.jpeg.output_scanline < d.jpeg.output_height)
                jpeg_read_scanlines(&d.jpeg, rows, 16);
            jpeg_finish_decompress(&d.jpeg);
        }
    }
    jpeg_destroy_decompress(&d.jpeg);
    snprintf(message, DT_MESSAGE, "%s", d.errors.message);
    return d.errors.status;
}

/* The version of libjpeg's interface. */
DT_API int dt_jpeg_version(void) { return JPEG_LIB_VERSION; }
