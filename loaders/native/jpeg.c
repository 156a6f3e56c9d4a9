/* JPEG to pixels with libjpeg-turbo: only the part that is wanted, with errors caught. */
#include "core.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

/* A progressive file may repeat scans without end, each of which takes time; real ones have about ten. (libjpeg-turbo's
 * own limit in its fuzzers is 500.) */
#define MOST_SCANS 500

struct dt_decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    int status; /* of the error that was escaped from */
    char message[JMSG_LENGTH_MAX];
};

static void escape(j_common_ptr jpeg)
{
    dt_decoder *decoder = (dt_decoder *)jpeg->client_data;
    jpeg->err->format_message(jpeg, decoder->message);
    decoder->status = jpeg->err->msg_code == JERR_OUT_OF_MEMORY ? DT_NO_MEMORY : DT_UNDECODABLE;
    longjmp(decoder->escape, 1);
}

/* Every warning is an error: the pixels after it would be wrong. */
static void heed(j_common_ptr jpeg, int level)
{
    if (level < 0)
        escape(jpeg);
}

static void print_nothing(j_common_ptr jpeg) { (void)jpeg; }

static void limit_scans(j_common_ptr jpeg)
{
    if (jpeg->is_decompressor && ((j_decompress_ptr)jpeg)->input_scan_number > MOST_SCANS) {
        dt_decoder *decoder = (dt_decoder *)jpeg->client_data;
        snprintf(decoder->message, sizeof decoder->message, "more than %d scans", MOST_SCANS);
        decoder->status = DT_UNDECODABLE;
        longjmp(decoder->escape, 1);
    }
}

/* Returns whether there was memory. */
static int create(dt_decoder *decoder)
{
    if (setjmp(decoder->escape)) {
        jpeg_destroy_decompress(&decoder->jpeg);
        return 0;
    }
    jpeg_create_decompress(&decoder->jpeg);
    decoder->jpeg.progress = &decoder->progress;
    return 1;
}

dt_decoder *dt_decoder_new(void)
{
    dt_decoder *decoder = calloc(1, sizeof *decoder);
    if (decoder == NULL)
        return NULL;
    decoder->jpeg.err = jpeg_std_error(&decoder->errors);
    decoder->errors.error_exit = escape;
    decoder->errors.emit_message = heed;
    decoder->errors.output_message = print_nothing;
    decoder->progress.progress_monitor = limit_scans;
    decoder->jpeg.client_data = decoder;
    if (!create(decoder)) {
        free(decoder);
        return NULL;
    }
    return decoder;
}

void dt_decoder_free(dt_decoder *decoder)
{
    if (decoder == NULL)
        return;
    jpeg_destroy_decompress(&decoder->jpeg);
    free(decoder);
}

/* Read the header and choose how to decode; DT_WRONG_SIZE if the picture does not have `height` × `width` pixels. */
static int begin(dt_decoder *decoder, const uint8_t *data, size_t size, int64_t height, int64_t width, int share,
                 int fast)
{
    j_decompress_ptr jpeg = &decoder->jpeg;
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
 * decodes for the picture's edges: a further block on either side makes the wanted ones exact. */
static JDIMENSION crop(j_decompress_ptr jpeg, dt_region wanted)
{
    jpeg_start_decompress(jpeg);
    JDIMENSION block = (JDIMENSION)(jpeg->max_h_samp_factor * jpeg->min_DCT_scaled_size);
    JDIMENSION first = (JDIMENSION)wanted.left / block * block;
    JDIMENSION end = ((JDIMENSION)wanted.right + block - 1) / block * block + block;
    first = first > block ? first - block : 0;
    end = end < jpeg->output_width ? end : jpeg->output_width;
    if (first > 0 || end < jpeg->output_width) {
        JDIMENSION columns = end - first;
        jpeg_crop_scanline(jpeg, &first, &columns);
    }
    if (wanted.top > 0)
        jpeg_skip_scanlines(jpeg, (JDIMENSION)wanted.top);
    return first;
}

int dt_decode(dt_decoder *decoder, const uint8_t *data, size_t size, int64_t height, int64_t width, int share, int fast,
              dt_region wanted, dt_buffer *memory, dt_image *image)
{
    j_decompress_ptr jpeg = &decoder->jpeg;
    decoder->message[0] = 0;
    if (setjmp(decoder->escape)) {
        jpeg_abort_decompress(jpeg);
        return decoder->status;
    }
    int status = begin(decoder, data, size, height, width, share, fast);
    if (status != DT_OK) {
        jpeg_abort_decompress(jpeg);
        return status;
    }
    JDIMENSION first = crop(jpeg, wanted);
    size_t stride = (size_t)jpeg->output_width * 3;
    uint8_t *pixels = dt_reserve(memory, stride * (size_t)(wanted.bottom - wanted.top));
    if (pixels == NULL) {
        jpeg_abort_decompress(jpeg);
        return DT_NO_MEMORY;
    }
    while (jpeg->output_scanline < wanted.bottom) {
        JSAMPROW rows[16];
        JDIMENSION left = (JDIMENSION)wanted.bottom - jpeg->output_scanline, count = left < 16 ? left : 16;
        for (JDIMENSION row = 0; row < count; row++)
            rows[row] = pixels + stride * (size_t)(jpeg->output_scanline - wanted.top + row);
        jpeg_read_scanlines(jpeg, rows, count);
    }
    if (jpeg->output_scanline == jpeg->output_height)
        jpeg_finish_decompress(jpeg); /* which notices a missing end */
    else
        jpeg_abort_decompress(jpeg);
    *image = (dt_image){pixels + 3 * (wanted.left - first), stride, wanted.bottom - wanted.top,
                        wanted.right - wanted.left};
    return DT_OK;
}

/* Whether a JPEG of `height` × `width` pixels decodes to its end at 1/`share` of its size; else `message` (200 bytes)
 * says what libjpeg complains of. The pixels are not kept. */
DT_API int dt_jpeg_check(const uint8_t *data, size_t size, int64_t height, int64_t width, int share, char *message)
{
    message[0] = 0;
    dt_decoder *decoder = dt_decoder_new();
    if (decoder == NULL)
        return DT_NO_MEMORY;
    j_decompress_ptr jpeg = &decoder->jpeg;
    volatile int status;
    if (!setjmp(decoder->escape)) {
        status = begin(decoder, data, size, height, width, share, 0);
        if (status == DT_OK) {
            jpeg_start_decompress(jpeg);
            JSAMPARRAY rows = jpeg->mem->alloc_sarray((j_common_ptr)jpeg, JPOOL_IMAGE, jpeg->output_width * 3, 16);
            while (jpeg->output_scanline < jpeg->output_height)
                jpeg_read_scanlines(jpeg, rows, 16);
            jpeg_finish_decompress(jpeg);
        }
    } else {
        status = decoder->status;
        memcpy(message, decoder->message, sizeof decoder->message);
    }
    dt_decoder_free(decoder);
    return status;
}
