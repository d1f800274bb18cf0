/* text.c - the collision experiment as tables. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "cli/collide/collide.h"

enum { WIDTH = 100 };

/* Text wrapped between columns `indent` and WIDTH. */
static void print_wrapped(const char *text, int indent) {
    int at = WIDTH;
    while (*text) {
        const int word = (int)strcspn(text, " ");
        const bool breaks = at + 1 + word > WIDTH;
        if (breaks) printf("\n%*s", indent, "");
        else putchar(' ');
        at = (breaks ? indent : at + 1) + word;
        printf("%.*s", word, text);
        text += word;
        text += *text == ' ';
    }
    putchar('\n');
}

static void print_number(const char *format, int width, double x) {
    if (isnan(x)) printf(" %*s", width, "-");
    else printf(format, x);
}

static void print_setup(const mn_collide *c) {
    const mn_collision_setup *s = &c->setup;
    printf("collision: overlap %g; %" PRId64 " passes over A..F, %" PRId64 " writes of B, %" PRId64
           " writes of A; D = %d, m = %d\n",
           s->rho, s->n_seed, s->n_boost, s->n_flood, MN_COLLISION_D, MN_COLLISION_M);
    printf("           p0 = %g, l2 = %g, r2 = %g, A_t = I; reset c = %g, so w = c/(c + r2) = %g; "
           "ccq gamma = %g\n",
           s->p0, s->l2, s->r2, s->c, s->c / (s->c + s->r2), s->gamma);
}

static void print_rule(const mn_collide *c, mn_collision_rule rule) {
    const mn_collision_point *x = c->points[rule], *end = &x[c->length - 1];
    const int64_t crossing = mn_collision_crossing(x, &c->setup);
    printf("  %-15s", mn_collision_name(rule));
    if (c->same_as[rule] != rule) {
        printf(" as %-53s", mn_collision_name(c->same_as[rule]));
    } else {
        print_number(" %6.3f", 6, c->boost_end > 0 ? x[c->boost_end - 1].p : NAN);
        printf(" %6.3f %+7.3f", end->p, end->margin);
        if (crossing > 0) printf(" %6" PRId64, crossing);
        else printf(" %6s", "never");
        printf(" %7.4f %7.4f", end->b[0], end->b[1]);
        print_number(" %6.4f", 6, end->var_b);
        print_number(" %5.3f", 5, end->gain);
    }
    printf("  %s\n", mn_collision_settings(rule));
}

static void print_rules(const mn_collide *c) {
    printf("\nAsked for B after the boost (t = %" PRId64 ") and after the flood (t = %" PRId64
           "): p is the "
           "softmax over the answers\nb(A), b(B) to k_B, margin is 2p - 1; \"lost\" is the first "
           "flood write "
           "after which A outweighs B.\n\n",
           c->boost_end, c->length);
    printf("  %-15s %6s %6s %7s %6s %7s %7s %6s %5s  %s\n", "", "boost", "flood", "margin", "lost",
           "b(A)", "b(B)", "var_B", "gain", "set to");
    for (int rule = 0; rule < MN_COLLISION_RULES; rule++) print_rule(c, (mn_collision_rule)rule);
    const char *row, *why;
    for (int i = 0; mn_collision_absent(i, &row, &why); i++) {
        printf("  %-15s cannot: %s\n", row, why);
    }
}

static void print_theory(const mn_collide *c) {
    mn_collide_check checks[MN_COLLIDE_CHECKS];
    const int n = mn_collide_checks(checks, c);
    puts("\nClosed forms (Appendix E of the paper), evaluated from the state before the flood, and "
         "the run.\n"
         "Limits of an endless flood stand beside the end of this one.\n");
    printf("  %-32s %-13s %10s %10s\n", "", "", "predicted", "measured");
    for (int i = 0; i < n; i++) {
        printf("  %-32s %-13s %10.5f", checks[i].what, checks[i].where, checks[i].predicted);
        print_number(" %10.5f", 10, checks[i].measured);
        if (checks[i].t > 0) printf("  t = %" PRId64, checks[i].t);
        putchar('\n');
    }
}

static void print_sweep(const mn_collide *c) {
    puts("\nMargin at the end, by overlap (table E.4.3):\n");
    printf("  %-15s", "rho");
    for (int i = 0; i < MN_COLLIDE_OVERLAPS; i++) printf(" %7.2f", c->overlap[i]);
    putchar('\n');
    for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
        if ((int)c->same_as[rule] != rule) continue;
        printf("  %-15s", mn_collision_name((mn_collision_rule)rule));
        for (int i = 0; i < MN_COLLIDE_OVERLAPS; i++) printf(" %+7.3f", c->sweep[i][rule]);
        putchar('\n');
    }
}

static void print_crossing(int64_t t) {
    if (t > 0) printf(" %6" PRId64, t);
    else printf(" %6s", "never");
}

static void print_priors(const mn_collide *c) {
    puts(
        "\nFixed predicted covariance c I (table E.4.2): no constant gain does what bayes does.\n");
    printf("  %8s %6s   rho = %-9g   rho = 0.99\n", "c", "gain", c->setup.rho);
    printf("  %8s %6s   %7s %6s   %7s %6s\n", "", "", "margin", "lost", "margin", "lost");
    for (int i = 0; i < MN_COLLIDE_PRIORS; i++) {
        printf("  %8.2f %6.2f", c->prior[i].c, c->prior[i].gain);
        for (int at = 0; at < 2; at++) {
            printf("   %+7.2f", c->prior[i].margin[at]);
            print_crossing(c->prior[i].crossing[at]);
        }
        putchar('\n');
    }
    printf("  %8s %6s   %+7.2f %6s   %+7.2f\n", "bayes", "varies", c->bayes_margin[0], "",
           c->bayes_margin[1]);
}

void mn_collide_print(const mn_collide *c) {
    print_setup(c);
    print_rules(c);
    print_theory(c);
    print_sweep(c);
    print_priors(c);
    printf("\nBeside the paper:");
    for (int i = 0; mn_collide_note(i); i++) print_wrapped(mn_collide_note(i), 2);
}
