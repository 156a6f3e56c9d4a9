/* Lossless recoding of JPEGs: the same coefficients as baseline JPEG with Huffman tables made for them. */
#include "libjpeg.h"

#include <stdlib.h>

/* Everything of one call, so that nothing is lost when libjpeg jumps out of it. */
typedef struct {
    dt_jpeg_errors errors; /* first: libjpeg has its address only */
    struct jpeg_destination_mgr sink;
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    const uint8_t *jpeg;
    size_t size;
    uint8_t *bytes;
    size_t room, limit; /* of `bytes`: now, and at most; one more than the result has, as libjpeg wants some left */
    int is_too_long;
    jpeg_scan_info scans[MAX_COMPONENTS];
} recoding;

/* The destination: memory that doubles up to the limit. */
static void start(j_compress_ptr info)
{
    recoding *work = (recoding *)info->err;
    work->sink.next_output_byte = work->bytes;
    work->sink.free_in_buffer = work->room;
}

static boolean grow(j_compress_ptr info)
{
    recoding *work = (recoding *)info->err;
    size_t used = work->room; /* libjpeg calls this when all of it is full */
    if (used >= work->limit) {
        work->is_too_long = 1;
        dt_escape(&work->errors, DT_OK, "");
    }
    size_t room = used > work->limit / 2 ? work->limit : 2 * used;
    uint8_t *bytes = realloc(work->bytes, room);
    if (bytes == NULL)
        dt_escape(&work->errors, DT_NO_MEMORY, "no memory for the recoded file");
    work->bytes = bytes;
    work->room = room;
    work->sink.next_output_byte = bytes + used;
    work->sink.free_in_buffer = room - used;
    return TRUE;
}

static void end(j_compress_ptr info) { (void)info; }

/* Refuse what decodes to no picture of the loader's. */
static void check(recoding *work)
{
    const struct jpeg_decompress_struct *from = &work->from;
    if (from->data_precision != 8)
        dt_escape(&work->errors, DT_UNDECODABLE, "its samples do not have 8 bits");
    for (int i = 0; i < from->num_components; i++) {
        const jpeg_component_info *own = &from->comp_info[i];
        if (from->max_h_samp_factor % own->h_samp_factor != 0 || from->max_v_samp_factor % own->v_samp_factor != 0)
            dt_escape(&work->errors, DT_UNDECODABLE, "its sampling factors have no whole ratio");
    }
}

/* Refuse a progressive picture without all bits of its low frequencies: decoders smooth it, but not its baseline copy.
 * libjpeg's smoothing looks at the first ten coefficients, in zigzag order. */
static void check_scans(recoding *work)
{
    const struct jpeg_decompress_struct *from = &work->from;
    if (from->coef_bits == NULL)
        return;
    for (int i = 0; i < from->num_components; i++)
        for (int k = 0; k < 10; k++)
            if (from->coef_bits[i][k] != 0)
                dt_escape(&work->errors, DT_UNDECODABLE, "scans are missing");
}

/* One scan for each component, where one scan for all would be too large for the format. */
static void separate_scans(struct jpeg_compress_struct *to, jpeg_scan_info *scans)
{
    int blocks = 0;
    for (int i = 0; i < to->num_components; i++)
        blocks += to->comp_info[i].h_samp_factor * to->comp_info[i].v_samp_factor;
    if (to->num_components == 1 || (blocks <= C_MAX_BLOCKS_IN_MCU && to->num_components <= MAX_COMPS_IN_SCAN))
        return;
    for (int i = 0; i < to->num_components; i++)
        scans[i] = (jpeg_scan_info){.comps_in_scan = 1, .component_index = {i}, .Se = DCTSIZE2 - 1};
    to->scan_info = scans;
    to->num_scans = to->num_components;
}

static void recode(void *argument)
{
    recoding *work = argument;
    struct jpeg_decompress_struct *from = &work->from;
    struct jpeg_compress_struct *to = &work->to;
    jpeg_create_compress(to);
    dt_open_jpeg(from, work->jpeg, work->size, 1);
    check(work);
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(from);
    check_scans(work);
    jpeg_copy_critical_parameters(from, to);
    /* The marker says how CMYK is meant: with it, readers invert. Others get what their colors need. */
    if (to->jpeg_color_space == JCS_CMYK)
        to->write_Adobe_marker = from->saw_Adobe_marker;
    to->optimize_coding = TRUE;
    to->arith_code = FALSE;
    separate_scans(to, work->scans);
    to->dest = &work->sink;
    jpeg_write_coefficients(to, coefficients);
    jpeg_finish_compress(to);
    jpeg_finish_decompress(from);
}

DT_API int dt_recode(const uint8_t *jpeg, size_t size, size_t most, const dt_limits *limits, uint8_t **result,
                     size_t *result_size, char *message)
{
    *result = NULL;
    *result_size = 0;
    message[0] = 0;
    size_t limit = most < SIZE_MAX ? most + 1 : most;
    recoding *work = calloc(1, sizeof *work);
    uint8_t *bytes = malloc(size < most ? size + 1 : limit);
    if (work == NULL || bytes == NULL) {
        snprintf(message, DT_MESSAGE, "no memory for the recoded file");
        free(work);
        free(bytes);
        return DT_NO_MEMORY;
    }
    work->jpeg = jpeg;
    work->size = size;
    work->limit = limit;
    work->room = size < most ? size + 1 : limit;
    work->bytes = bytes;
    work->from.err = work->to.err = dt_catch_errors(&work->errors, limits);
    work->sink.init_destination = start;
    work->sink.empty_output_buffer = grow;
    work->sink.term_destination = end;
    int status = dt_guarded(&work->errors, recode, work);
    if (status == DT_OK && !work->is_too_long) {
        *result = work->bytes;
        *result_size = work->room - work->sink.free_in_buffer;
        work->bytes = NULL;
    }
    jpeg_destroy_compress(&work->to);
    jpeg_destroy_decompress(&work->from);
    snprintf(message, DT_MESSAGE, "%s", work->errors.message);
    free(work->bytes);
    free(work);
    return status;
}

DT_API void dt_free(void *result) { free(result); }
