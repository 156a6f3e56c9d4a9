/* The entry point for libFuzzer: checks, decodes in part and as a whole, and recodes the bytes; see native_fuzz.py. */
#include "../../loaders/native/core.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_PIXELS = 1 << 18 };

static const dt_limits limits = {NULL, 1 << 24};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The size that the first frame header claims. */
static int find_size(const uint8_t *data, size_t size, int64_t *height, int64_t *width)
{
    for (size_t at = 2; at + 9 < size; at++)
        if (data[at] == 0xFF && (data[at + 1] & 0xF0) == 0xC0 && data[at + 1] != 0xC4 && data[at + 1] != 0xC8 &&
            data[at + 1] != 0xCC) {
            *height = data[at + 5] << 8 | data[at + 6];
            *width = data[at + 7] << 8 | data[at + 8];
            return *height > 0 && *width > 0 && *height * *width <= MOST_PIXELS;
        }
    return 0;
}

/* What decodes as a whole must decode in part, to the same bytes. The last bytes of the file select the part. */
static void compare(dt_jpeg source, dt_buffer *memory)
{
    uint32_t draw = dt_crc32(0, source.data, source.size);
    int share = 1 << (draw & 3), fast = (draw >> 2 & 3) == 0;
    int64_t rows = (source.height + share - 1) / share, columns = (source.width + share - 1) / share;
    dt_region all = {0, 0, rows, columns}, part = {(draw >> 4 & 255) % rows, (draw >> 12 & 255) % columns, rows, columns};
    part.bottom = part.top + 1 + (draw >> 20 & 63) % (rows - part.top);
    part.right = part.left + 1 + (draw >> 26) % (columns - part.left);
    dt_image whole, found;
    if (dt_decode(source, share, fast, all, &limits, &memory[0], &whole) != DT_OK)
        return;
    if (dt_decode(source, share, fast, part, &limits, &memory[1], &found) != DT_OK)
        abort();
    for (int64_t y = 0; y < found.rows; y++)
        if (memcmp(found.data + (size_t)y * found.stride,
                   whole.data + (size_t)(part.top + y) * whole.stride + 3 * (size_t)part.left, 3 * (size_t)found.columns))
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static dt_buffer memory[2];
    int64_t height, width;
    char message[DT_MESSAGE];
    uint8_t *result;
    size_t recoded;
    if (!find_size(data, size, &height, &width))
        return 0;
    dt_jpeg_check(data, size, height, width, 1, &limits, message);
    compare((dt_jpeg){data, size, height, width}, memory);
    dt_recode(data, size, SIZE_MAX, &limits, &result, &recoded, message);
    dt_free(result);
    return 0;
}
