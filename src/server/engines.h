/* engines.h - the engine that serves, and those before it whose requests are not answered yet: a
 * model is read again while the one before goes on. */
#ifndef MN_SERVER_ENGINES_H
#define MN_SERVER_ENGINES_H

#include "server/engine.h"

typedef struct mn_engines mn_engines;

/* `options` stay the caller's and are read again by every reload. */
mn_status mn_engines_open(mn_engines **out, const mn_engine_options *options);
void mn_engines_close(mn_engines *engines);    // NULL accepted

/* The engine of a request that comes now, to be given back when the request is over. */
mn_engine *mn_engines_take(mn_engines *engines);
void mn_engines_give(mn_engines *engines, mn_engine *engine);

/* Opens the folder again: requests from now on are served by what is there now, those that run by
 * the model they began with. Stored states are of a model and go with it. On failure all stays as
 * it was. One thread at a time. */
mn_status mn_engines_reload(mn_engines *engines);

/* Closes engines that nobody uses any more. From the thread that reloads. */
void mn_engines_sweep(mn_engines *engines);

/* No new requests; those that run finish for at most `seconds`. */
void mn_engines_drain(mn_engines *engines, double seconds);

#endif
