/* libjpeg's errors as statuses and messages. */
#include "jpeg_errors.h"

#include <string.h>

#include <jerror.h>

_Static_assert(JMSG_LENGTH_MAX <= DT_MESSAGE, "libjpeg's messages fit");

/* A progressive file may repeat scans without end, and each takes a pass over all coefficients; real ones have about
 * ten. (libjpeg-turbo's own limit in its fuzzers is 500.) */
#define MOST_SCANS 500

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

static void count_scans(j_common_ptr jpeg)
{
    char message[DT_MESSAGE];
    if (((j_decompress_ptr)jpeg)->input_scan_number <= MOST_SCANS)
        return;
    snprintf(message, sizeof message, "it has more than %d scans", MOST_SCANS);
    dt_escape((dt_jpeg_errors *)jpeg->err, DT_UNDECODABLE, message);
}

struct jpeg_error_mgr *dt_catch_errors(dt_jpeg_errors *errors)
{
    memset(errors, 0, sizeof *errors);
    jpeg_std_error(&errors->manager);
    errors->manager.error_exit = fail;
    errors->manager.emit_message = heed;
    errors->manager.output_message = print_nothing;
    errors->progress.progress_monitor = count_scans;
    return &errors->manager;
}

void dt_limit_scans(j_decompress_ptr jpeg) { jpeg->progress = &((dt_jpeg_errors *)jpeg->err)->progress; }
