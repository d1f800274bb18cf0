/* maps.c - pictures of what experiments saw inside models: Kalman attention matrices
 * with the variance beside them (maps-N), and alignment by layer (alignment-N). One picture for
 * each task or model, of its first seed. */
#include "cli/reproduce/reproduce_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "cli/plot/gnuplot.h"
#include "experiments/job.h"
#include "io/file.h"

enum { PATH = 4096, NAME = 32, TITLE = 200, WIDTH = 340, HEIGHT = 360 };

static double at(const json_t *list, size_t i) {
    return json_number_value(json_array_get(list, i));
}

/* ---- maps ------------------------------------------------------------------------------------ */

/* A matrix as rows of numbers, zeros above the diagonal, the sign kept. */
static void put_matrix(FILE *out, const json_t *rows, size_t channel) {
    const size_t T = json_array_size(rows);
    fprintf(out, "$map%zu << EOD\n", channel);
    for (size_t t = 0; t < T; t++) {
        const json_t *row = json_array_get(rows, t);
        for (size_t s = 0; s < T; s++) fprintf(out, "%s%.4g", s > 0 ? "," : "", at(row, s));
        fputc('\n', out);
    }
    fputs("EOD\n", out);
}

static double largest_of(const json_t *rows) {
    double largest = 0.0;
    for (size_t t = 0; t < json_array_size(rows); t++) {
        const json_t *row = json_array_get(rows, t);
        for (size_t s = 0; s <= t; s++) largest = fmax(largest, fabs(at(row, s)));
    }
    return largest > 0.0 ? largest : 1.0;
}

static void put_variance(FILE *out, const json_t *maps) {
    const json_t *cell = json_object_get(maps, "cell_variance");
    const json_t *read = json_object_get(maps, "read_variance");
    const json_t *targets = json_object_get(maps, "targets");
    fputs("$variance << EOD\n", out);
    for (size_t t = 0; t < json_array_size(cell); t++) {
        fprintf(out, "%zu,%.5g,%.5g,%s\n", t, at(cell, t), at(read, t),
                json_integer_value(json_array_get(targets, t)) >= 0 ? "0" : "NaN");
    }
    fputs("EOD\n", out);
}

static void put_maps(FILE *out, const json_t *maps, const char *name, const char *title) {
    const json_t *channels = json_object_get(maps, "channels");
    const size_t n = json_array_size(channels);
    const size_t T = json_array_size(json_object_get(maps, "tokens"));
    for (size_t i = 0; i < n; i++) {
        put_matrix(out, json_object_get(json_array_get(channels, i), "rows"), i);
    }
    put_variance(out, maps);
    mn_gnuplot_begin(out, name, title, WIDTH * (int)(n + 1), HEIGHT, (int)n + 1);
    fputs("set palette defined (-1 '#0b4f9c', 0 '#ffffff', 1 '#b2182b')\nunset colorbox\n"
          "unset key\n", out);
    for (size_t i = 0; i < n; i++) {
        const json_int_t channel =
            json_integer_value(json_object_get(json_array_get(channels, i), "channel"));
        const double m = largest_of(json_object_get(json_array_get(channels, i), "rows"));
        fprintf(out, "set cbrange [%g:%g]\n"
                "set xrange [-0.5:%zu.5]\nset yrange [%zu.5:-0.5] \nset title 'channel %lld'\n"
                "set xlabel 'value of token'\nset ylabel 'output at token'\n"
                "plot $map%zu matrix with image\n", -m, m, T - 1, T - 1, (long long)channel, i);
    }
    fputs("set autoscale y\nset yrange [0:*]\nset key below samplen 1\nset title 'variance'\n"
          "set xlabel 'token'\nset ylabel ''\n"
          "plot $variance using 1:2 with lines lw 2 lc rgb '#0b4f9c' title 'of a cell', "
          "$variance using 1:3 with lines lw 2 lc rgb '#d95f02' title 'of what is read', "
          "$variance using 1:4 with points pt 5 ps 0.4 lc rgb '#5b5b5b' title 'asked'\n", out);
    mn_gnuplot_end(out);
}

static void put_maps_csv(FILE *out, const json_t *maps) {
    const json_t *channels = json_object_get(maps, "channels");
    fputs("channel,output_at,value_of,weight\n", out);
    for (size_t i = 0; i < json_array_size(channels); i++) {
        const json_t *one = json_array_get(channels, i), *rows = json_object_get(one, "rows");
        for (size_t t = 0; t < json_array_size(rows); t++) {
            for (size_t s = 0; s <= t; s++) {
                fprintf(out, "%lld,%zu,%zu,%.5g\n",
                        (long long)json_integer_value(json_object_get(one, "channel")), t, s,
                        at(json_array_get(rows, t), s));
            }
        }
    }
}

/* ---- alignment ------------------------------------------------------------------------------- */

static void put_alignment(FILE *out, const json_t *alignment, const char *name, const char *title) {
    const json_t *layers = json_object_get(alignment, "layers");
    fputs("$layers << EOD\n", out);
    for (size_t i = 0; i < json_array_size(layers); i++) {
        const json_t *one = json_array_get(layers, i);
        static const char *const keys[] = { "layer", "needle", "rest", "gap", "gap_deviation" };
        for (size_t k = 0; k < 5; k++) {
            const json_t *value = json_object_get(one, keys[k]);
            if (json_is_number(value)) fprintf(out, "%.6g,", json_number_value(value));
            else fputs("NaN,", out);
        }
        fputc('\n', out);
    }
    fputs("EOD\n", out);
    mn_gnuplot_begin(out, name, title, 2 * WIDTH, HEIGHT, 2);
    fprintf(out, "set xrange [-0.3:%zu.3]\nset xtics %d\n", json_array_size(layers) - 1,
            json_array_size(layers) <= 12 ? 1 : 4);
    fputs("set xlabel 'layer'\nset key below samplen 1\nset title 'along the main directions'\n"
          "plot $layers using 1:2 with linespoints lw 2 pt 7 lc rgb '#b2182b' title 'needle', "
          "$layers using 1:3 with linespoints lw 2 pt 7 lc rgb '#0b4f9c' title 'rest'\n"
          "set title 'gap'\nunset key\nset xzeroaxis\n"
          "plot $layers using 1:4:5 with yerrorbars pt 7 lc rgb '#303030'\n", out);
    mn_gnuplot_end(out);
}

static void put_alignment_csv(FILE *out, const json_t *alignment) {
    static const char *const keys[] = { "layer", "needle", "whole", "rest", "gap",
                                        "gap_deviation", "whole_gap" };
    const json_t *layers = json_object_get(alignment, "layers");
    fputs("layer,needle,whole,rest,gap,gap_deviation,whole_gap\n", out);
    for (size_t i = 0; i < json_array_size(layers); i++) {
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            const json_t *value = json_object_get(json_array_get(layers, i), keys[k]);
            if (json_is_number(value)) fprintf(out, "%.9g", json_number_value(value));
            fputc(k + 1 < sizeof keys / sizeof *keys ? ',' : '\n', out);
        }
    }
}

/* ---- all of them ----------------------------------------------------------------------------- */

static const struct {
    const char *key;
    void (*script)(FILE *out, const json_t *found, const char *name, const char *title);
    void (*csv)(FILE *out, const json_t *found);
} pictures[] = { { "maps", put_maps, put_maps_csv },
                 { "alignment", put_alignment, put_alignment_csv } };

/* Writes what `put` or `script` prints as FOLDER/NAME.SUFFIX. */
static mn_status write_one(const char *folder, const char *name, size_t kind, const json_t *found,
                           const char *title, bool csv) {
    char path[PATH], *text = NULL;
    size_t size = 0;
    if (snprintf(path, sizeof path, "%s/%s.%s", folder, name, csv ? "csv" : "gp") >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    FILE *out = open_memstream(&text, &size);
    if (!out) return mn_fail(MN_ERR_MEMORY, "no memory for %s", path);
    if (csv) pictures[kind].csv(out, found);
    else pictures[kind].script(out, found, name, title);
    const mn_status st = fclose(out) == 0 ? mn_file_write_bytes(path, text, size)
                                          : mn_fail(MN_ERR_MEMORY, "no memory for %s", path);
    free(text);
    return st;
}

/* Labels of a run but for its seed, as one text. */
static void title_of(char title[TITLE], const json_t *run) {
    json_t *labels = json_copy(json_object_get(run, "labels"));
    json_object_del(labels, "seed");
    json_t *job = json_pack("{s:o}", "labels", labels ? labels : json_object());
    mn_job_title(title, TITLE, job);
    json_decref(job);
}

static bool is_new(json_t *seen, const char *title) {
    if (json_object_get(seen, title)) return false;
    json_object_set_new(seen, title, json_true());
    return true;
}

mn_status mn_reproduce_pictures(json_t *figures, const mn_json *results, const char *folder,
                                bool draw) {
    const json_t *runs = json_object_get(results->value, "runs");
    mn_status st = MN_OK;
    for (size_t kind = 0; kind < sizeof pictures / sizeof *pictures; kind++) {
        json_t *seen = json_object();
        int n = 0;
        for (size_t i = 0; st == MN_OK && i < json_array_size(runs); i++) {
            const json_t *run = json_array_get(runs, i);
            const json_t *found = json_object_get(json_object_get(run, "result"),
                                                  pictures[kind].key);
            char title[TITLE], name[NAME], script[NAME + 8];
            title_of(title, run);
            if (!found || !is_new(seen, title)) continue;
            snprintf(name, sizeof name, "%s-%d", pictures[kind].key, ++n);
            snprintf(script, sizeof script, "%s.gp", name);
            st = write_one(folder, name, kind, found, title, true);
            if (st == MN_OK && draw) st = write_one(folder, name, kind, found, title, false);
            if (st == MN_OK && draw) st = mn_gnuplot_run(folder, script);
            if (st == MN_OK && draw) json_array_append_new(figures, json_sprintf("%s.svg", name));
        }
        json_decref(seen);
    }
    return st;
}
