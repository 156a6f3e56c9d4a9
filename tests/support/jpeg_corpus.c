/* Writes small JPEGs of every kind that libjpeg reads: the corpus of the fuzzers, and of the tests of cropping.
 *
 *     jpeg_corpus FOLDER
 *     jpeg_corpus FOLDER HEIGHT WIDTH SAMPLING WAY DETAIL
 *
 * Each of the samplings below in each of the ways, in several sizes, as FOLDER/SIZE-SAMPLING-WAY.jpg. Or one of them, with
 * DETAIL lines that are not plain.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

enum { COLORS = 3, INKS = 4 };

/* Sampling factors, horizontal and vertical, of Y, and of Cb and Cr. Up to ten blocks fit into one scan; of the others, each
 * component has a scan of its own. */
static const int samplings[][4] = {
    {1, 1, 1, 1}, {2, 1, 1, 1}, {1, 2, 1, 1}, {2, 2, 1, 1}, {4, 1, 1, 1}, {1, 4, 1, 1}, {4, 2, 1, 1}, {2, 4, 1, 1},
    {4, 4, 1, 1}, {3, 1, 1, 1}, {1, 3, 1, 1}, {3, 2, 1, 1}, {2, 3, 1, 1}, {3, 3, 1, 1}, {4, 3, 1, 1}, {3, 4, 1, 1},
    {4, 1, 2, 1}, {1, 4, 1, 2}, {2, 2, 2, 1}, {2, 2, 1, 2}, {4, 2, 2, 1}, {2, 4, 1, 2}, {4, 4, 2, 2}, {4, 2, 2, 2},
    {1, 1, 2, 2}, {1, 1, 2, 1}, {1, 1, 4, 1}, {2, 1, 1, 2}, {2, 2, 2, 2}, {1, 1, 4, 2}, {4, 2, 1, 2}, {1, 2, 2, 1},
};

enum way { BASELINE, RESTARTS, ARITHMETIC, PROGRESSIVE, ARITHMETIC_PROGRESSIVE, SEPARATE, MISSING, GRAY, CMYK, RGB, WAYS };

static const int sizes[][2] = {{64, 80}, {37, 51}, {16, 16}, {8, 200}, {131, 9}};

static uint32_t state = 1;

static uint32_t next(void)
{
    state ^= state << 13; /* xorshift32 (Marsaglia 2003) */
    state ^= state >> 17;
    return state ^= state << 5;
}

/* A scan of each component, with all or some of its coefficients. */
static int separate_scans(struct jpeg_compress_struct *jpeg, int last, jpeg_scan_info *scans)
{
    for (int i = 0; i < jpeg->num_components; i++)
        scans[i] = (jpeg_scan_info){.comps_in_scan = 1, .component_index = {i}, .Se = last};
    return jpeg->num_components;
}

static void set_way(struct jpeg_compress_struct *jpeg, enum way way, int blocks, jpeg_scan_info *scans)
{
    jpeg->arith_code = way == ARITHMETIC || way == ARITHMETIC_PROGRESSIVE;
    jpeg->restart_interval = way == RESTARTS ? 2 : 0;
    if (way == PROGRESSIVE || way == ARITHMETIC_PROGRESSIVE) {
        jpeg_simple_progression(jpeg);
        if (blocks > C_MAX_BLOCKS_IN_MCU) { /* its first scan is of all components */
            jpeg->num_scans = separate_scans(jpeg, 0, scans);
            jpeg->scan_info = scans;
        }
    } else if (way == MISSING) { /* the DC values, and of Y the first AC values, without their last bit */
        jpeg->num_scans = separate_scans(jpeg, 0, scans);
        scans[jpeg->num_scans++] = (jpeg_scan_info){.comps_in_scan = 1, .Ss = 1, .Se = 5, .Al = 1};
        jpeg->scan_info = scans;
    } else if (way == SEPARATE || blocks > C_MAX_BLOCKS_IN_MCU) {
        jpeg->num_scans = separate_scans(jpeg, DCTSIZE2 - 1, scans);
        jpeg->scan_info = scans;
    }
}

/* A smooth picture with some noise, and plain from line `detail` on. */
static void write_lines(struct jpeg_compress_struct *jpeg, int detail)
{
    JSAMPLE *line = malloc((size_t)INKS * jpeg->image_width);
    while (jpeg->next_scanline < jpeg->image_height) {
        int y = (int)jpeg->next_scanline;
        for (int x = 0; x < (int)jpeg->image_width; x++)
            for (int c = 0; c < jpeg->input_components; c++)
                line[x * jpeg->input_components + c] =
                    y >= detail ? 90 : (JSAMPLE)((x * (3 + c) + y * (5 - c) + (x * y >> (4 + c))) / 2 % 224 + (int)(next() % 32));
        JSAMPROW rows[] = {line};
        jpeg_write_scanlines(jpeg, rows, 1);
    }
    free(line);
}

static int write_jpeg(FILE *file, const int *size, const int *sampling, enum way way, int detail)
{
    struct jpeg_error_mgr errors;
    struct jpeg_compress_struct jpeg;
    jpeg_scan_info scans[MAX_COMPONENTS + 1];
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    jpeg_stdio_dest(&jpeg, file);
    jpeg.image_height = (JDIMENSION)size[0];
    jpeg.image_width = (JDIMENSION)size[1];
    jpeg.input_components = way == GRAY ? 1 : way == CMYK ? INKS : COLORS;
    jpeg.in_color_space = way == GRAY ? JCS_GRAYSCALE : way == CMYK ? JCS_CMYK : JCS_RGB;
    jpeg_set_defaults(&jpeg);
    if (way == RGB)
        jpeg_set_colorspace(&jpeg, JCS_RGB);
    jpeg_set_quality(&jpeg, 80, TRUE);
    int blocks = 0;
    for (int i = 0; i < jpeg.num_components; i++) {
        int is_luma = i == 0 || i == 3;
        jpeg.comp_info[i].h_samp_factor = sampling[is_luma ? 0 : 2];
        jpeg.comp_info[i].v_samp_factor = sampling[is_luma ? 1 : 3];
        blocks += jpeg.comp_info[i].h_samp_factor * jpeg.comp_info[i].v_samp_factor;
    }
    set_way(&jpeg, way, jpeg.num_components == 1 ? 1 : blocks, scans);
    jpeg_start_compress(&jpeg, TRUE);
    write_lines(&jpeg, detail);
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    return ferror(file);
}

static int write_file(const char *folder, const int *size, const int *of, enum way way, int detail)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%dx%d-%d%d%d%d-%d.jpg", folder, size[0], size[1], of[0], of[1], of[2], of[3], (int)way);
    FILE *file = fopen(path, "wb");
    return file == NULL || write_jpeg(file, size, of, way, detail) || fclose(file);
}

int main(int count, char **arguments)
{
    if (count == 7) {
        int size[] = {atoi(arguments[2]), atoi(arguments[3])}, of[4];
        for (int i = 0; i < 4; i++)
            of[i] = arguments[4][i] - '0';
        return write_file(arguments[1], size, of, (enum way)atoi(arguments[5]), atoi(arguments[6]));
    }
    if (count != 2)
        return 2;
    for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++)
        for (size_t sampling = 0; sampling < sizeof samplings / sizeof *samplings; sampling++)
            for (enum way way = 0; way < WAYS; way++)
                if (write_file(arguments[1], sizes[size], samplings[sampling], way, sizes[size][0]))
                    return 1;
    return 0;
}
