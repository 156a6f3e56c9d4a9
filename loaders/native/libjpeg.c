/* libjpeg's errors as statuses and messages, and limits of the time and the memory that a picture takes. */
#define _GNU_SOURCE /* dladdr */
#include "libjpeg.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <jerror.h>

_Static_assert(JMSG_LENGTH_MAX <= DT_MESSAGE, "libjpeg's messages fit");

/* A progressive file may repeat scans without end, and each takes a pass over all coefficients, about two nanoseconds a
 * pixel; real ones have about ten. (libjpeg-turbo's own limit in its fuzzers is 500 scans.) The second limit is 8 seconds,
 * and 24 scans of the largest picture that Pillow opens. */
#define MOST_SCANS 500
#define MOST_WORK (UINT64_C(1) << 32) /* pixels · scans; at least one scan of the format's largest picture */

_Noreturn void dt_escape(dt_jpeg_errors *errors, int status, const char *message)
{
    errors->status = status;
    snprintf(errors->message, sizeof errors->message, "%s", message);
    longjmp(errors->escape, 1);
}

static void fail(j_common_ptr jpeg)
{
    char message[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, message);
    int status = jpeg->err->msg_code == JERR_OUT_OF_MEMORY ? DT_NO_MEMORY : DT_UNDECODABLE;
    dt_escape((dt_jpeg_errors *)jpeg->err, status, message);
}

/* Every warning is an error: the pixels after it would be wrong. */
static void heed(j_common_ptr jpeg, int level)
{
    if (level < 0)
        fail(jpeg);
}

static void print_nothing(j_common_ptr jpeg) { (void)jpeg; }

static void heed_stop(dt_jpeg_errors *errors)
{
    if (dt_is_stopped(errors->limits))
        dt_escape(errors, DT_STOPPED, "it was stopped");
}

/* libjpeg calls this before each row of blocks that it reads, and before the lines that it returns. */
static void watch(j_common_ptr jpeg)
{
    dt_jpeg_errors *errors = (dt_jpeg_errors *)jpeg->err;
    heed_stop(errors);
    if (((j_decompress_ptr)jpeg)->input_scan_number <= errors->most_scans)
        return;
    char message[DT_MESSAGE];
    snprintf(message, sizeof message, "it has more than %d scans, the most for its size", errors->most_scans);
    dt_escape(errors, DT_UNDECODABLE, message);
}

struct jpeg_error_mgr *dt_catch_errors(dt_jpeg_errors *errors, const dt_limits *limits)
{
    memset(errors, 0, sizeof *errors);
    jpeg_std_error(&errors->manager);
    errors->manager.error_exit = fail;
    errors->manager.emit_message = heed;
    errors->manager.output_message = print_nothing;
    errors->progress.progress_monitor = watch;
    errors->limits = limits;
    errors->most_scans = MOST_SCANS;
    return &errors->manager;
}

int dt_guarded(dt_jpeg_errors *errors, void (*work)(void *), void *argument)
{
    if (setjmp(errors->escape) == 0)
        work(argument);
    return errors->status;
}

/* Zeros that an encoder of arithmetic codes leaves out at most. Photographs have up to 3; pictures of 1600 × 1600 pixels, plain
 * from some line on, up to 19: what the statistics take to adapt. Of 60 photographs whose scan was cut off at 10, 50 or 90 %,
 * sequential ones lack more than 79, progressive ones more than 30. */
#define MOST_ZEROS 32

/* Bytes of the file that libjpeg gets at a time: it takes them in some milliseconds, also where it skips lines, and does
 * not look at the progress. Most photographs are smaller. */
#ifndef DT_PIECE
#define DT_PIECE (1 << 18)
#endif

static void do_nothing(j_decompress_ptr jpeg) { (void)jpeg; }

/* Find the first marker from these bytes of the file on, other than restarts within a scan. */
static void find_marker(dt_jpeg_errors *errors, const uint8_t *from)
{
    errors->marker = errors->end;
    for (const uint8_t *at = from; (at = memchr(at, 0xFF, (size_t)(errors->end - at))) != NULL;) {
        const uint8_t *code = at + 1;
        while (code < errors->end && *code == 0xFF)
            code++;
        if (code == errors->end)
            return;
        if (*code != 0 && (*code < 0xD0 || *code > 0xD7)) {
            errors->marker = at;
            return;
        }
        at = code;
    }
}

/* Give a zero in the place of the marker that follows the arithmetic codes of a scan: an encoder leaves out the zeros at their
 * end, and libjpeg adds them. So codes that were cut off decode without a warning, to a picture whose rest is made up; that
 * libjpeg wants many zeros is the only sign. */
static void give_zero(j_decompress_ptr jpeg)
{
    static const uint8_t zero = 0;
    dt_jpeg_errors *errors = (dt_jpeg_errors *)jpeg->err;
    errors->zeros = errors->scan == jpeg->input_scan_number ? errors->zeros + 1 : 1;
    errors->scan = jpeg->input_scan_number;
    if (errors->zeros > MOST_ZEROS)
        dt_escape(errors, DT_UNDECODABLE, "Premature end of arithmetic codes");
    jpeg->src->next_input_byte = &zero;
    jpeg->src->bytes_in_buffer = 1;
}

/* Give libjpeg what follows: where it reads arithmetic codes, only to the next marker. */
static boolean next_piece(j_decompress_ptr jpeg)
{
    dt_jpeg_errors *errors = (dt_jpeg_errors *)jpeg->err;
    heed_stop(errors);
    size_t left = (size_t)(errors->end - errors->next);
    if (left == 0) {
        jpeg->err->msg_code = JWRN_JPEG_EOF;
        fail((j_common_ptr)jpeg);
    }
    if (errors->is_arithmetic) {
        if (errors->marker < errors->next)
            find_marker(errors, errors->next);
        /* Not where the scan refines what others have: its bits may well be zeros, and it makes up the last bits only. */
        if (errors->marker == errors->next && jpeg->Ah == 0 && jpeg->input_iMCU_row < jpeg->total_iMCU_rows) {
            give_zero(jpeg);
            return TRUE;
        }
        if (errors->marker == errors->next)
            find_marker(errors, errors->next + 1);
        left = (size_t)(errors->marker - errors->next);
    }
    jpeg->src->next_input_byte = errors->next;
    jpeg->src->bytes_in_buffer = left < DT_PIECE ? left : DT_PIECE;
    errors->next += jpeg->src->bytes_in_buffer;
    return TRUE;
}

static void skip_bytes(j_decompress_ptr jpeg, long count)
{
    for (; count > (long)jpeg->src->bytes_in_buffer; next_piece(jpeg))
        count -= (long)jpeg->src->bytes_in_buffer;
    if (count > 0) {
        jpeg->src->next_input_byte += count;
        jpeg->src->bytes_in_buffer -= (size_t)count;
    }
}

static void set_source(j_decompress_ptr jpeg, const uint8_t *data, size_t size)
{
    dt_jpeg_errors *errors = (dt_jpeg_errors *)jpeg->err;
    errors->next = errors->marker = data;
    errors->end = data + size;
    errors->source = (struct jpeg_source_mgr){
        .init_source = do_nothing, .fill_input_buffer = next_piece,
        .skip_input_data = skip_bytes, .resync_to_restart = jpeg_resync_to_restart, .term_source = do_nothing};
    jpeg->src = &errors->source;
}

/* The memory for all coefficients of a picture whose header was read, in bytes, as libjpeg allocates it. */
static uint64_t coefficient_bytes(const struct jpeg_decompress_struct *jpeg)
{
    uint64_t wide = (uint64_t)jpeg->max_h_samp_factor, high = (uint64_t)jpeg->max_v_samp_factor, blocks = 0;
    uint64_t columns = (jpeg->image_width + 8 * wide - 1) / (8 * wide);
    uint64_t rows = (jpeg->image_height + 8 * high - 1) / (8 * high);
    for (int i = 0; i < jpeg->num_components; i++)
        blocks += columns * (uint64_t)jpeg->comp_info[i].h_samp_factor * rows * (uint64_t)jpeg->comp_info[i].v_samp_factor;
    return blocks * sizeof(JBLOCK);
}

void dt_open_jpeg(j_decompress_ptr jpeg, const uint8_t *data, size_t size, int keeps_coefficients)
{
    dt_jpeg_errors *errors = (dt_jpeg_errors *)jpeg->err;
    jpeg_create_decompress(jpeg); /* clears all but `err` */
    jpeg->progress = &errors->progress;
    set_source(jpeg, data, size);
    jpeg_read_header(jpeg, TRUE);
    if (jpeg->arith_code) { /* what follows is given to it again, in other pieces */
        errors->is_arithmetic = 1;
        errors->next = jpeg->src->next_input_byte;
        jpeg->src->bytes_in_buffer = 0;
    }
    uint64_t pixels = (uint64_t)jpeg->image_width * jpeg->image_height;
    if (pixels * MOST_SCANS > MOST_WORK)
        errors->most_scans = (int)(MOST_WORK / pixels);
    if (!keeps_coefficients && !jpeg_has_multiple_scans(jpeg))
        return;
    uint64_t bytes = coefficient_bytes(jpeg);
    if (errors->limits != NULL && bytes > errors->limits->memory) {
        char message[DT_MESSAGE];
        snprintf(message, sizeof message, "its coefficients take more memory than allowed, %.1f MB of %.1f MB",
                 (double)bytes / 1e6, (double)errors->limits->memory / 1e6);
        dt_escape(errors, DT_TOO_LARGE, message);
    }
}

static void open_and_close(void *argument)
{
    jpeg_create_decompress((j_decompress_ptr)argument); /* fails if the library is not of the header's version */
    jpeg_destroy_decompress((j_decompress_ptr)argument);
}

DT_API int dt_jpeg_version(char *message)
{
    dt_jpeg_errors errors;
    struct jpeg_decompress_struct jpeg = {.err = dt_catch_errors(&errors, NULL)};
    int status = dt_guarded(&errors, open_and_close, &jpeg);
    if (status != DT_OK) {
        snprintf(message, DT_MESSAGE, "%s", errors.message);
        return status;
    }
    char version[JMSG_LENGTH_MAX];
    jpeg.err->msg_code = JMSG_VERSION; /* of the library that is loaded, not of the header */
    jpeg.err->format_message((j_common_ptr)&jpeg, version);
    Dl_info info = {0};
    char *path = dladdr((void *)(uintptr_t)jpeg_std_error, &info) && info.dli_fname ? realpath(info.dli_fname, NULL) : NULL;
    snprintf(message, DT_MESSAGE, "interface %d, version %.40s, %.160s", JPEG_LIB_VERSION, version,
             path ? path : "in this library");
    free(path);
    return DT_OK;
}
