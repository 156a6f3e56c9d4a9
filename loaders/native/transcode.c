/* Lossless recoding of JPEGs: the same coefficients as baseline JPEG with Huffman tables made for them. */
#include "jpeg_errors.h"

#include <stdlib.h>

/* Everything of one call, so that nothing is lost when libjpeg jumps out of it. */
typedef struct {
    dt_jpeg_errors errors; /* first: libjpeg has its address only */
    struct jpeg_destination_mgr sink;
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    uint8_t *bytes;
    size_t room, limit; /* of `bytes`: now, and at most; one more than the result has, as libjpeg wants some left */
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
    if (used >= work->limit)
        dt_escape(&work->errors, DT_OK, "");
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

/* Refuses what decodes to no picture of the loader's, and what would take too much memory. */
static void check(recoding *work, uint64_t memory)
{
    const struct jpeg_decompress_struct *from = &work->from;
    uint64_t needed = 0, high = 1, wide = 1;
    if (from->data_precision != 8)
        dt_escape(&work->errors, DT_UNDECODABLE, "its samples do not have 8 bits");
    for (int i = 0; i < from->num_components; i++) {
        if ((uint64_t)from->comp_info[i].h_samp_factor > wide)
            wide = (uint64_t)from->comp_info[i].h_samp_factor;
        if ((uint64_t)from->comp_info[i].v_samp_factor > high)
            high = (uint64_t)from->comp_info[i].v_samp_factor;
    }
    uint64_t columns = (from->image_width + 8 * wide - 1) / (8 * wide);
    uint64_t rows = (from->image_height + 8 * high - 1) / (8 * high);
    for (int i = 0; i < from->num_components; i++) {
        uint64_t h = (uint64_t)from->comp_info[i].h_samp_factor, v = (uint64_t)from->comp_info[i].v_samp_factor;
        if (wide % h != 0 || high % v != 0)
            dt_escape(&work->errors, DT_UNDECODABLE, "its sampling factors have no whole ratio");
        needed += columns * h * rows * v * sizeof(JBLOCK);
    }
    if (needed > memory)
        dt_escape(&work->errors, DT_WRONG_SIZE, "its coefficients take more memory than allowed");
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

static void recode(recoding *work, const uint8_t *jpeg, size_t size, uint64_t memory, jpeg_scan_info *scans)
{
    struct jpeg_decompress_struct *from = &work->from;
    struct jpeg_compress_struct *to = &work->to;
    jpeg_create_decompress(from);
    jpeg_create_compress(to);
    jpeg_mem_src(from, jpeg, (unsigned long)size);
    dt_limit_scans(from);
    jpeg_read_header(from, TRUE);
    check(work, memory);
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(from);
    check_scans(work);
    jpeg_copy_critical_parameters(from, to);
    /* The marker says how CMYK is meant: with it, readers invert. Others get what their colours need. */
    if (to->jpeg_color_space == JCS_CMYK)
        to->write_Adobe_marker = from->saw_Adobe_marker;
    to->optimize_coding = TRUE;
    to->arith_code = FALSE;
    separate_scans(to, scans);
    to->dest = &work->sink;
    jpeg_write_coefficients(to, coefficients);
    jpeg_finish_compress(to);
    jpeg_finish_decompress(from);
}

DT_API int dt_recode(const uint8_t *jpeg, size_t size, uint64_t memory, size_t most, uint8_t **result,
                     size_t *result_size, char *message)
{
    *result = NULL;
    *result_size = 0;
    message[0] = 0;
    jpeg_scan_info scans[MAX_COMPONENTS];
    recoding *work = calloc(1, sizeof *work);
    if (work == NULL)
        return DT_NO_MEMORY;
    work->limit = most < SIZE_MAX ? most + 1 : most;
    work->room = size < most ? size + 1 : work->limit;
    work->bytes = malloc(work->room);
    work->from.err = work->to.err = dt_catch_errors(&work->errors);
    work->sink.init_destination = start;
    work->sink.empty_output_buffer = grow;
    work->sink.term_destination = end;
    if (work->bytes == NULL) {
        work->errors.status = DT_NO_MEMORY;
    } else if (size == 0 || size > UINT32_MAX) { /* an unsigned long may have 32 bits */
        work->errors.status = DT_UNDECODABLE;
        snprintf(work->errors.message, DT_MESSAGE, "it has %zu bytes", size);
    } else if (setjmp(work->errors.escape) == 0) {
        recode(work, jpeg, size, memory, scans);
        *result = work->bytes;
        *result_size = work->room - work->sink.free_in_buffer;
        work->bytes = NULL;
    }
    jpeg_destroy_compress(&work->to);
    jpeg_destroy_decompress(&work->from);
    int status = work->errors.status;
    snprintf(message, DT_MESSAGE, "%s", work->errors.message);
    free(work->bytes);
    free(work);
    return status;
}

DT_API void dt_free(void *result) { free(result); }
