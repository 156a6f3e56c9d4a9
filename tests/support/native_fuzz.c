/* Feeds damaged JPEGs and tables to the native core, compiled with sanitizers; see native_fuzz.py, which builds and runs it.
 *
 *     fuzz CORPUS SEED EXECUTIONS THREADS ROUNDS
 *
 * Each execution takes a file of the corpus, damages it or not, and loads it. Some also decode it as a whole, and in part,
 * at a random scale, and recode it. What decodes as a whole must decode in part, and recoded, and to the same bytes.
 * After each round its threads end and release their memory; what the process still has is printed.
 */
#define _GNU_SOURCE
#include "../../loaders/native/core.h"

#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MOST_FILES = 4096, LARGEST = 1 << 17, MOST_PIXELS = 1 << 18, MOST_THREADS = 16 };

typedef struct {
    uint8_t *data;
    size_t size;
} file;

static _Thread_local uint64_t state;

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

/* The size that the first frame header claims, as a `.beton` would; otherwise any. */
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

/* Of every call; the flag is never set. */
static const int32_t no_stop;
static const dt_limits limits = {&no_stop, 1 << 24};

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
    dt_jpeg source = {jpeg->data, jpeg->size, height, width};
    int status = dt_decode(source, share, fast, all, &limits, &memory[0], &whole);
    int of_part = dt_decode(source, share, fast, part, &limits, &memory[1], &found);
    if (status != DT_OK)
        return 0;
    if (of_part != DT_OK)
        fail("the whole decodes, a part does not", number);
    for (int64_t y = 0; y < found.rows; y++)
        if (memcmp(found.data + (size_t)y * found.stride,
                   whole.data + (size_t)(part.top + y) * whole.stride + 3 * (size_t)part.left, 3 * (size_t)found.columns))
            fail("a part has other pixels than the whole", number);
    dt_resizing resizing;
    memset(&resizing, 0, sizeof resizing);
    uint8_t target[3 * 24 * 20];
    if (dt_resize(found, (double)part.top, (double)part.left, (double)found.rows, (double)found.columns, (int)next(2),
                  target, 24, 20, &resizing) != DT_OK)
        fail("no memory to resize", number);
    dt_buffer *buffers[] = {&resizing.first, &resizing.weights, &resizing.rows, &resizing.columns, &resizing.turned};
    for (size_t i = 0; i < 5; i++)
        dt_release(buffers[i]);
    return 1;
}

/* Recode a JPEG. If it decodes, what it becomes decodes to the same bytes. */
static void recode(const file *jpeg, int64_t height, int64_t width, dt_buffer *memory, int64_t number)
{
    uint8_t *result;
    size_t size;
    char message[DT_MESSAGE];
    int status = dt_recode(jpeg->data, jpeg->size, next(4) ? SIZE_MAX : next(4096), &limits, &result, &size, message);
    if (status != DT_OK && (result != NULL || message[0] == 0))
        fail("not recoded, without a reason", number);
    if (result == NULL)
        return;
    dt_region all = {0, 0, height, width};
    dt_image before, after;
    dt_jpeg source = {jpeg->data, jpeg->size, height, width}, plain = {result, size, height, width};
    if (dt_decode(source, 1, 0, all, &limits, &memory[0], &before) == DT_OK) {
        if (dt_decode(plain, 1, 0, all, &limits, &memory[1], &after) != DT_OK)
            fail("what was recoded does not decode", number);
        for (int64_t y = 0; y < height; y++)
            if (memcmp(before.data + (size_t)y * before.stride, after.data + (size_t)y * after.stride, 3 * (size_t)width))
                fail("what was recoded has other pixels", number);
    }
    dt_free(result);
}

enum { VIEWS = 3 };

/* What is drawn for the views of a sample, which may be anything. */
typedef struct {
    int64_t boxes[4 * VIEWS], places[4 * VIEWS], corners[2 * VIEWS], operations[2 * VIEWS];
    double colors[4 * VIEWS], magnitudes[2 * VIEWS];
    float weights[2 * VIEWS], images[24 * 20 * 4 * VIEWS];
    uint8_t flips[VIEWS];
} drawn;

/* Draw the `views` of `settings` of a picture of `rows` × `columns`, which has the output's size if they are shifted. */
static dt_choices draw(drawn *to, const dt_settings *settings, int views, uint64_t rows, uint64_t columns)
{
    int within = rows > 0 && columns > 0 && next(16);
    for (int view = 0; view < views; view++) {
        for (int k = 0; k < 4; k++)
            to->boxes[4 * view + k] = (int64_t)next(next(16) ? 320 : INT64_MAX) - (int64_t)next(2) * 8;
        if (within) {
            int64_t *box = to->boxes + 4 * view;
            box[0] = (int64_t)next(rows), box[1] = (int64_t)next(columns);
            box[2] = 1 + (int64_t)next(rows - (uint64_t)box[0]), box[3] = 1 + (int64_t)next(columns - (uint64_t)box[1]);
        }
        if (settings->method == DT_SHIFT)
            to->boxes[4 * view] = (int64_t)next(9) - 4, to->boxes[4 * view + 1] = (int64_t)next(9) - 4;
        uint64_t height = (uint64_t)settings->height, width = (uint64_t)settings->width;
        int64_t *place = to->places + 4 * view;
        place[0] = (int64_t)next(height), place[1] = (int64_t)next(width);
        place[2] = next(8) ? 1 + (int64_t)next(height - (uint64_t)place[0]) : (int64_t)next(INT64_MAX) - 8;
        place[3] = next(8) ? 1 + (int64_t)next(width - (uint64_t)place[1]) : (int64_t)next(30) - 8;
        double colors[] = {0.5, 1.5, 1.2, (double)next(6)};
        memcpy(to->colors + 4 * view, colors, sizeof colors);
        for (int k = 2 * view; k < 2 * view + 2; k++) {
            to->operations[k] = (int64_t)next(15);
            to->magnitudes[k] = to->operations[k] == 10   ? (double)next(9)
                                : to->operations[k] == 14 ? (double)next(64) / 20 - 0.1
                                                          : (double)next(64) / 64 - 0.5;
            to->weights[k] = 0.5f;
        }
        to->corners[2 * view] = (int64_t)next((uint64_t)settings->height - 5);
        to->corners[2 * view + 1] = (int64_t)next((uint64_t)settings->width - 5);
        to->flips[view] = (uint8_t)next(2);
    }
    return (dt_choices){to->boxes, to->flips, next(2) ? to->colors : NULL, next(2) ? to->corners : NULL, 1, 2,
                        next(2) ? to->operations : NULL, to->magnitudes, next(2) ? to->weights : NULL,
                        next(2) ? to->places : NULL};
}

/* Load a sample of a `.beton`, in one group of views or two. Its tables describe the JPEG of `size` bytes at its beginning,
 * or raw pixels, or contain anything. Returns whether it was loaded. */
static int load_anything(dt_workspace *workspace, int descriptor, int64_t height, int64_t width, size_t size)
{
    int32_t descriptors[] = {descriptor}, modes[] = {(int32_t)next(2)}, status = -1;
    uint16_t widths[] = {(uint16_t)next(next(8) ? 300 : 65536)}, heights[] = {(uint16_t)next(next(8) ? 300 : 65536)};
    uint64_t pointers[] = {next(next(8) ? LARGEST : UINT64_MAX)}, sizes[] = {next(next(64) ? LARGEST : 1 << 30)};
    int64_t indices[] = {0};
    /* Three channels of bytes; sometimes up to four, of two bytes; and, rarely, what there is not. */
    int64_t channels = next(2) ? 3 : next(32) ? 1 + (int64_t)next(4) : (int64_t)next(9);
    int64_t bytes = next(2) ? 1 : next(32) ? 1 + (int64_t)next(2) : (int64_t)next(5);
    float factors[4 * 20] = {1}, summands[4 * 20] = {0};
    uint16_t table[3 * 256] = {0};
    uint32_t crc;
    if (channels != 3 || bytes != 1)
        modes[0] = next(16) != 0;
    if (next(2)) { /* pixels that are there */
        heights[0] = (uint16_t)(1 + next(100)), widths[0] = (uint16_t)(1 + next(100)), pointers[0] = next(2) * next(100);
        uint64_t exact = (uint64_t)(heights[0] * widths[0] * channels * bytes);
        sizes[0] = exact < LARGEST - 100 ? exact : LARGEST - 100;
    }
    dt_samples samples = {descriptors, modes, widths, heights, pointers, sizes, channels, bytes};
    int32_t method = (int32_t)next(DT_PILLOW + 1), dtype = (int32_t)next(3);
    int64_t others = next(64) ? channels : (int64_t)next(5);
    dt_settings settings[] = {
        {24, 20, method, dtype, channels, bytes, factors, summands, table, 5, {1, 2, 3}},
        {8, 12, method == DT_SHIFT ? 0 : method, dtype, others, bytes, factors, summands, table, 5, {1, 2, 3}}};
    if (method == DT_SHIFT)
        heights[0] = 24, widths[0] = 20;
    else if (channels == 3 && bytes == 1 && next(4) && height > 0 && width > 0 && height * width <= MOST_PIXELS) {
        modes[0] = height * width * 3 <= LARGEST && next(4) == 0;
        heights[0] = (uint16_t)height, widths[0] = (uint16_t)width;
        pointers[0] = 0, sizes[0] = modes[0] ? LARGEST : size;
    }
    static _Thread_local drawn memory[2];
    dt_views groups[2];
    dt_choices choices[2];
    for (int k = 0; k < 2; k++) {
        int views = 1 + (int)next(VIEWS);
        choices[k] = draw(&memory[k], &settings[k], views, heights[0], widths[0]);
        if (next(8) && (channels != 3 || bytes != 1))
            choices[k].colors = NULL, choices[k].operations = NULL;
        groups[k] = (dt_views){&settings[k], &choices[k], views, memory[k].images};
    }
    dt_load(workspace, &samples, indices, 1, groups, 1 + (int64_t)next(2), &limits, next(2) ? &crc : NULL, &status);
    if (status < DT_OK || status > DT_TOO_LARGE || status == DT_STOPPED)
        fail("a sample without a status", 0);
    return status == DT_OK;
}

typedef struct {
    const file *files;
    size_t known;
    uint64_t seed;
    int64_t executions, decoded, loaded;
} share;

static void *work(void *argument)
{
    share *own = argument;
    state = own->seed * 2 + 1;
    dt_buffer memory[2] = {{0}, {0}};
    dt_workspace *workspace = dt_workspace_new();
    uint8_t *data = calloc(1, LARGEST);
    int descriptor = memfd_create("beton", 0);
    if (pwrite(descriptor, data, LARGEST, 0) != LARGEST)
        fail("no memory for a file", 0);
    for (int64_t number = 0; number < own->executions; number++) {
        const file *sound = &own->files[next(own->known)];
        memcpy(data, sound->data, sound->size);
        /* In memory of exactly its size, so that reading past its end is found. */
        file jpeg = {NULL, damage(data, sound->size)};
        jpeg.data = malloc(jpeg.size);
        memcpy(jpeg.data, data, jpeg.size);
        int64_t height, width;
        find_size(jpeg.data, jpeg.size, &height, &width);
        if (next(4) == 0 && height > 0 && width > 0 && height * width <= MOST_PIXELS) {
            char message[DT_MESSAGE];
            int status = dt_jpeg_check(jpeg.data, jpeg.size, height, width, 1 << next(4), &limits, message);
            if (status == DT_UNDECODABLE && message[0] == 0)
                fail("an error without a message", number);
            own->decoded += compare(&jpeg, height, width, memory, number);
            recode(&jpeg, height, width, memory, number);
        }
        if (pwrite(descriptor, jpeg.data, jpeg.size, 0) != (ssize_t)jpeg.size)
            fail("no memory for a file", number);
        own->loaded += load_anything(workspace, descriptor, height, width, jpeg.size);
        free(jpeg.data);
    }
    close(descriptor);
    dt_workspace_free(workspace);
    dt_release(&memory[0]);
    dt_release(&memory[1]);
    free(data);
    return NULL;
}

/* Print what is allocated, and what the process has in memory, in bytes. (A sanitizer's allocator reports nothing.) */
static void print_memory(int64_t executions)
{
    struct mallinfo2 all = mallinfo2();
    long pages = 0;
    FILE *usage = fopen("/proc/self/statm", "r");
    if (usage == NULL || fscanf(usage, "%*s %ld", &pages) != 1)
        fail("no /proc", 0);
    fclose(usage);
    printf("%lld executions: %zu bytes allocated, %ld resident\n", (long long)executions, all.uordblks + all.hblkhd,
           pages * sysconf(_SC_PAGESIZE));
    fflush(stdout);
}

int main(int count, char **arguments)
{
    static file files[MOST_FILES];
    static share shares[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    if (count != 6)
        return 2;
    size_t known = read_corpus(arguments[1], files);
    int64_t executions = strtoll(arguments[3], NULL, 10), total = 0, decoded = 0, loaded = 0;
    int workers = atoi(arguments[4]), rounds = atoi(arguments[5]);
    if (known == 0 || workers < 1 || workers > MOST_THREADS || rounds < 1)
        return 2;
    print_memory(0);
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < workers; i++) {
            uint64_t seed = (strtoull(arguments[2], NULL, 10) * (uint64_t)rounds + (uint64_t)round) * MOST_THREADS;
            shares[i] = (share){files, known, seed + (uint64_t)i, executions / workers / rounds, 0, 0};
            pthread_create(&threads[i], NULL, work, &shares[i]);
        }
        for (int i = 0; i < workers; i++) {
            pthread_join(threads[i], NULL);
            total += shares[i].executions;
            decoded += shares[i].decoded;
            loaded += shares[i].loaded;
        }
        print_memory(total);
    }
    for (size_t i = 0; i < MOST_FILES; i++)
        free(files[i].data);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("%lld executions, %lld decoded, %lld loaded, %ld KiB\n", (long long)total, (long long)decoded, (long long)loaded,
           usage.ru_maxrss);
    return 0;
}
