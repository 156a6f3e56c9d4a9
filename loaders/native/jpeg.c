/* JPEG to pixels with libjpeg-turbo: only the part that is wanted, with errors caught. */
#include "libjpeg.h"

#include <string.h>

/* What one call decodes. A structure of libjpeg's for each picture: it keeps Huffman and quantization tables from picture
 * to picture, and a file that lacks its own would be decoded with those of another. */
typedef struct {
    dt_jpeg_errors errors;
    struct jpeg_decompress_struct jpeg;
    dt_jpeg source;
    int share, fast;
    dt_region wanted;
    dt_buffer *memory;
    dt_image *image;
} decoding;

/* Read the header and choose how to decode; escape if the picture has another size. */
static void begin(decoding *work)
{
    j_decompress_ptr jpeg = &work->jpeg;
    dt_open_jpeg(jpeg, work->source.data, work->source.size, 0);
    if (jpeg->image_height != work->source.height || jpeg->image_width != work->source.width)
        dt_escape(&work->errors, DT_WRONG_SIZE, "");
    jpeg->scale_num = 1;
    jpeg->scale_denom = (unsigned)work->share;
    jpeg->out_color_space = JCS_EXT_RGB;
    jpeg->dct_method = work->fast ? JDCT_IFAST : JDCT_ISLOW;
    jpeg_start_decompress(jpeg);
}

/* Whether libjpeg decodes some columns of this picture as it decodes all of them. Not where scans are missing: there it
 * smooths blocks by those two further. Nor where the inverse DCT enlarges a component, but not to the full size: then
 * `jpeg_crop_scanline` computes the width that is left to enlarge as if it had not. */
static int may_crop(const struct jpeg_decompress_struct *jpeg)
{
    if (jpeg->progressive_mode)
        return 0;
    int width = jpeg->max_h_samp_factor * DT_BLOCK_WIDTH(jpeg), height = jpeg->max_v_samp_factor * DT_BLOCK_HEIGHT(jpeg);
    for (int i = 0; i < jpeg->num_components; i++) {
        const jpeg_component_info *own = &jpeg->comp_info[i];
        int enlarged = DT_OWN_BLOCK_WIDTH(own) != DT_BLOCK_WIDTH(jpeg) || DT_OWN_BLOCK_HEIGHT(own) != DT_BLOCK_HEIGHT(jpeg);
        if (enlarged && (own->h_samp_factor * DT_OWN_BLOCK_WIDTH(own) != width ||
                         own->v_samp_factor * DT_OWN_BLOCK_HEIGHT(own) != height))
            return 0;
    }
    return 1;
}

/* Leave out columns outside of `wanted`. Returns the first column that is decoded.
 *
 * Where chroma is subsampled, libjpeg interpolates it between neighbours, and takes the first and last columns that it
 * decodes for the picture's edges: a further block on either side makes the wanted ones exact. */
static JDIMENSION crop_columns(j_decompress_ptr jpeg, dt_region wanted)
{
    JDIMENSION block = (JDIMENSION)(jpeg->max_h_samp_factor * DT_BLOCK_WIDTH(jpeg));
    JDIMENSION first = (JDIMENSION)wanted.left / block * block;
    JDIMENSION end = ((JDIMENSION)wanted.right + block - 1) / block * block + block;
    first = first > block ? first - block : 0;
    end = end < jpeg->output_width ? end : jpeg->output_width;
    if (!may_crop(jpeg))
        return 0;
    if (first > 0 || end < jpeg->output_width) {
        JDIMENSION columns = end - first;
        jpeg_crop_scanline(jpeg, &first, &columns);
    }
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

static void decode(void *argument)
{
    decoding *work = argument;
    j_decompress_ptr jpeg = &work->jpeg;
    dt_region wanted = work->wanted;
    begin(work);
    JDIMENSION first = crop_columns(jpeg, wanted);
    if (wanted.top > 0) /* in one call: in several, libjpeg's lines are not always those of the whole */
        jpeg_skip_scanlines(jpeg, (JDIMENSION)wanted.top);
    size_t stride = (size_t)jpeg->output_width * 3;
    uint8_t *pixels = dt_reserve(work->memory, stride * (size_t)(wanted.bottom - wanted.top));
    if (pixels == NULL)
        dt_escape(&work->errors, DT_NO_MEMORY, "");
    read_lines(jpeg, wanted, pixels, stride);
    *work->image = (dt_image){pixels + 3 * (wanted.left - first), stride, wanted.bottom - wanted.top,
                              wanted.right - wanted.left};
}

int dt_decode(dt_jpeg source, int share, int fast, dt_region wanted, const dt_limits *limits, dt_buffer *memory,
              dt_image *image)
{
    decoding work = {.source = source, .share = share, .fast = fast, .wanted = wanted, .memory = memory, .image = image};
    work.jpeg.err = dt_catch_errors(&work.errors, limits);
    int status = dt_guarded(&work.errors, decode, &work);
    jpeg_destroy_decompress(&work.jpeg);
    return status;
}

static void check(void *argument)
{
    decoding *work = argument;
    j_decompress_ptr jpeg = &work->jpeg;
    begin(work);
    JSAMPARRAY rows = jpeg->mem->alloc_sarray((j_common_ptr)jpeg, JPOOL_IMAGE, jpeg->output_width * 3, 16);
    while (jpeg->output_scanline < jpeg->output_height)
        jpeg_read_scanlines(jpeg, rows, 16);
    jpeg_finish_decompress(jpeg);
}

DT_API int dt_jpeg_check(const uint8_t *data, size_t size, int64_t height, int64_t width, int share,
                         const dt_limits *limits, char *message)
{
    decoding work = {.source = {data, size, height, width}, .share = share};
    work.jpeg.err = dt_catch_errors(&work.errors, limits);
    int status = dt_guarded(&work.errors, check, &work);
    jpeg_destroy_decompress(&work.jpeg);
    snprintf(message, DT_MESSAGE, "%s", work.errors.message);
    return status;
}
