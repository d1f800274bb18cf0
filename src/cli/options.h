/* options.h - the command line of a verb as a table: what each option is called and where its value
 * goes. Names that are unknown, values that are missing or out of range, and arguments that nobody
 * wants are answered with a sentence that names them. */
#ifndef MN_CLI_OPTIONS_H
#define MN_CLI_OPTIONS_H

#include <stdbool.h>

/* One of flag, text, count, list and read says what the option takes. */
typedef struct mn_option {
    const char *name;            // "--jobs"; NULL: arguments that belong to no option
    bool *flag;                  // no value; becomes true
    const char **text;           // the last one given; of arguments, only one
    int *count, low, high;       // a whole number
    const char **list;           // as many as are given, `most` of them, counted in n
    int *n, most;
    bool several;                // of a list: all arguments up to the next option
    bool (*read)(void *to, const char *value);    // false: it is not what is needed
    void *to;
    const char *needs;           // "a number from 0 to 1"; NULL: read called mn_fail
} mn_option;

/* Hears of the rows of every table that mn_options_read is given; it then reads nothing and says
 * that there was a mistake, so that a verb does nothing but name its options. */
typedef struct mn_option_listener {
    void (*hear)(void *context, const char *verb, const mn_option *row);
    void *context;
} mn_option_listener;

/* NULL: options are read again. */
void mn_options_listen(const mn_option_listener *listener);
bool mn_options_heard(void);    // somebody listens

/* Reads the name of a device into a const char *; NULL for "cpu". */
bool mn_options_device(void *to, const char *value);

/* argv[0] is the verb. Values follow their option, or an equals sign behind it. 0; 2 for a mistake,
 * after a line on standard error; -1 for --help or -h. */
int mn_options_read(const mn_option *rows, int n_rows, const char *verb, int argc, char **argv);

/* Says what is the matter with an option, or "" for none, and where help is; 2. */
int mn_options_mistake(const char *verb, const char *option, const char *what);

#endif
