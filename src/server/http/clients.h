/* clients.h - open connections and what each may take its time for: nobody holds one for ever by
 * sending little. Beyond this, libmicrohttpd closes those that say nothing at all for a while. */
#ifndef MN_SERVER_CLIENTS_H
#define MN_SERVER_CLIENTS_H

#include <stddef.h>

#include "mneme.h"

typedef struct mn_clients mn_clients;
typedef struct mn_client mn_client;

/* `most` connections, which get `timeout` seconds for the header of a request, and for its body as
 * much and a second for each 16 KiB of it. The more of them are taken, the less time there is for
 * headers. */
mn_status mn_clients_create(mn_clients **out, int most, int timeout);
void mn_clients_destroy(mn_clients *clients);    // NULL accepted

/* A connection has come; NULL without memory: it is not watched. */
mn_client *mn_clients_add(mn_clients *clients, int fd);
void mn_clients_remove(mn_clients *clients, mn_client *client);

/* The header of a request has been read; bytes of its body; all of it; it is answered. */
void mn_client_sends(mn_clients *clients, mn_client *client);
void mn_client_sent(mn_clients *clients, mn_client *client, size_t bytes);
void mn_client_waits(mn_clients *clients, mn_client *client);
void mn_client_rests(mn_clients *clients, mn_client *client);

/* Tells a client that is still sending that its request is refused, by `status` ("413 Content Too
 * Large") and a sentence in JSON. What it sends then may be read, but nothing is answered. */
void mn_clients_refuse(int fd, const char *status, const char *message);

/* Ends connections whose time is over; how many. From any thread. */
int mn_clients_sweep(mn_clients *clients);

#endif
