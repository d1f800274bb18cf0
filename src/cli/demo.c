/* demo.c - mneme demo */
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/command.h"
#include "cli/demo.h"
#include "cli/number.h"

int mn_command_demo(int argc, char **argv) {
    mn_demo_options o = { .layers = "bayes,attention", .steps = 1000, .seconds = 1000, .seed = 1 };
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--set")) o.sets[o.n_sets++] = argv[i + 1];
        if (!strcmp(argv[i], "--layers")) o.layers = argv[i + 1];
        if (!strcmp(argv[i], "--steps")) o.steps = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--seed")) o.seed = atoi(argv[i + 1]);
    }
    mn_demo *d = calloc(1, sizeof *d);
    d->options = &o;
    mn_status st = mn_demo_data_make(&d->data, o.seed);
    char *copy = strdup(o.layers);
    for (char *p = strtok(copy, ","); p; p = strtok(NULL, ",")) {
        for (char *c = p; *c; c++) if (*c == '/') *c = ',';
        snprintf(d->models[d->n_models].layers, 128, "%s", p);
        snprintf(d->models[d->n_models++].name, 128, "%s", p);
    }
    printf("%g sentences %g tokens %g questions, floor %.4f\n", d->data.means.sentences, d->data.means.tokens, d->data.means.questions, d->data.floor);
    if (st == MN_OK) st = mn_demo_train(d);
    if (st != MN_OK) { puts(mn_last_error()); return 1; }
    for (int i = 0; i < d->n_models; i++) {
        mn_demo_model *m = &d->models[i];
        mn_demo_result *r = &m->result;
        struct timespec ts; clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
        printf("%-16s params %ld sec %.1f cpu(all) %ld tok %ld loss %.4f (floor %.4f) gap %.4f+-%.4f acc %.3f of %ld |", m->name, (long)mn_model_count(mn_trainer_model(m->trainer)), m->seconds, (long)ts.tv_sec, (long)m->points[m->n_points-1].tokens, r->loss, r->floor, r->gap, r->gap_error, mn_demo_share(&r->all), (long)r->all.asked);
        for (int k = 0; k < 5; k++) printf(" %.2f(%ld)", mn_demo_share(&r->distance[k]), (long)r->distance[k].asked);
        printf(" |");
        for (int k = 0; k < 3; k++) printf(" %.2f(%ld)", mn_demo_share(&r->updates[k]), (long)r->updates[k].asked);
        printf("\n  curve:");
        for (int k = 0; k < m->n_points; k += m->n_points / 12 + 1) printf(" %.2f", m->points[k].loss);
        puts("");
    }
    return 0;
}
