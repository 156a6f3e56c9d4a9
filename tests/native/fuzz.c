/* Feeds mutated JPEGs to the native core, compiled with sanitizers; see fuzz.py, which builds and runs it.
 *
 *     fuzz CORPUS SEED EXECUTIONS
 *
 * Each execution takes a file of the corpus, damages it, and loads it as the loader would: a random crop at a random
 * scale, resized, from a file of its own. A JPEG that decodes as a whole must decode in part, and to the same bytes.
 */
#include "../../loaders/native/core.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FILES = 256, LARGEST = 1 << 16, MOST_PIXELS = 1 << 18 };

typedef struct {
    uint8_t *data;
    size_t size;
} file;

static uint64_t state;

static uint64_t next(uint64_t limit)
{
    state ^= state << 13; /* xorshift64 (Marsaglia 2003) */
    state ^= state >> 7;
    state ^= state << 17;
    return state % limit;
}

static size_t read_corpus(const char *folder, file *files)
{
    size_t count = 0;
    DIR *entries = opendir(folder);
    struct dirent *entry;
    while (entries != NULL && count < MOST_FILES && (entry = readdir(entries)) != NULL) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        FILE *opened = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (opened == NULL)
            continue;
        files[count].data = malloc(LARGEST);
        files[count].size = fread(files[count].data, 1, LARGEST, opened);
        count += files[count].size > 4;
        fclose(opened);
    }
    closedir(entries);
    return count;
}

/* Change a few bytes or bits, remove or repeat a stretch, cut the end off, or leave it as it is. */
static size_t damage(uint8_t *data, size_t size)
{
    for (uint64_t times = next(4); times > 0 && size > 8; times--) {
        size_t at = 2 + next(size - 2), length = 1 + next(size - at < 64 ? size - at : 64);
        switch (next(6)) {
        case 0: data[at] ^= (uint8_t)(1u << next(8)); break;
        case 1: data[at] = (uint8_t)next(256); break;
        case 2: memset(data + at, (int)next(256), length); break;
        case 3: memmove(data + at, data + at + length, size - at - length), size -= length; break;
        case 4:
            if (size + length <= LARGEST)
                memmove(data + at + length, data + at, size - at), size += length;
            break;
        default:
            if (next(4) == 0)
                size = at;
        }
    }
    return size;
}

/* The size that the first frame header claims, as a `.beton` would; sometimes another one. */
static void find_size(const uint8_t *data, size_t size, int64_t *height, int64_t *width)
{
    *height = *width = 1 + (int64_t)next(80);
    for (size_t at = 2; at + 9 < size; at++)
        if (data[at] == 0xFF && (data[at + 1] & 0xF0) == 0xC0 && data[at + 1] != 0xC4 && data[at + 1] != 0xC8 &&
            data[at + 1] != 0xCC) {
            *height = data[at + 5] << 8 | data[at + 6];
            *width = data[at + 7] << 8 | data[at + 8];
            return;
        }
}

static void fail(const char *what, int64_t number)
{
    fprintf(stderr, "execution %lld: %s\n", (long long)number, what);
    abort();
}

/* Decode the whole and a part of it; both give the same bytes. Returns whether the whole decodes. */
static int compare(const file *jpeg, int64_t height, int64_t width, dt_buffer *memory, int64_t number)
{
    int share = 1 << next(4), fast = next(4) == 0;
    int64_t rows = (height + share - 1) / share, columns = (width + share - 1) / share;
    dt_region all = {0, 0, rows, columns}, part;
    part.top = (int64_t)next((uint64_t)rows);
    part.left = (int64_t)next((uint64_t)columns);
    part.bottom = part.top + 1 + (int64_t)next((uint64_t)(rows - part.top));
    part.right = part.left + 1 + (int64_t)next((uint64_t)(columns - part.left));
    dt_image whole, found;
    int status = dt_decode(jpeg->data, jpeg->size, height, width, share, fast, all, &memory[0], &whole);
    int of_part = dt_decode(jpeg->data, jpeg->size, height, width, share, fast, part, &memory[1], &found);
    if (status != DT_OK)
        return 0;
    if (of_part != DT_OK)
        fail("the whole decodes, a part does not", number);
    for (int64_t y = 0; y < found.rows; y++)
        if (memcmp(found.data + (size_t)y * found.stride,
                   whole.data + (size_t)(part.top + y) * whole.stride + 3 * (size_t)part.left, 3 * (size_t)found.columns))
            fail("a part has other pixels than the whole", number);
    dt_resizing resizing = {{0}};
    uint8_t target[3 * 24 * 20];
    if (dt_resize(found, (double)part.top, (double)part.left, (double)found.rows, (double)found.columns, (int)next(2),
                  target, 24, 20, &resizing) != DT_OK)
        fail("no memory to resize", number);
    dt_buffer *buffers[] = {&resizing.first, &resizing.weights, &resizing.rows, &resizing.columns, &resizing.turned};
    for (size_t i = 0; i < 5; i++)
        dt_release(buffers[i]);
    return 1;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    static file files[MOST_FILES];
    size_t known = read_corpus(arguments[1], files);
    state = strtoull(arguments[2], NULL, 10) * 2 + 1;
    int64_t executions = strtoll(arguments[3], NULL, 10), decoded = 0;
    dt_buffer memory[2] = {{0}, {0}};
    uint8_t *data = malloc(LARGEST);
    for (int64_t number = 0; number < executions && known > 0; number++) {
        const file *sound = &files[next(known)];
        memcpy(data, sound->data, sound->size);
        /* In memory of exactly its size, so that reading past its end is found. */
        file jpeg = {NULL, damage(data, sound->size)};
        jpeg.data = malloc(jpeg.size);
        memcpy(jpeg.data, data, jpeg.size);
        int64_t height, width;
        find_size(jpeg.data, jpeg.size, &height, &width);
        if (height > 0 && width > 0 && height * width <= MOST_PIXELS) {
            char message[200];
            int status = dt_jpeg_check(jpeg.data, jpeg.size, height, width, 1 << next(4), message);
            if (status == DT_UNDECODABLE && message[0] == 0)
                fail("an error without a message", number);
            decoded += compare(&jpeg, height, width, memory, number);
        }
        free(jpeg.data);
    }
    dt_release(&memory[0]);
    dt_release(&memory[1]);
    free(data);
    for (size_t i = 0; i < MOST_FILES; i++)
        free(files[i].data);
    printf("%lld executions, %lld decoded\n", (long long)executions, (long long)decoded);
    return known == 0;
}
