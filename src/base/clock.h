/* clock.h - seconds that only go forward. */
#ifndef MN_BASE_CLOCK_H
#define MN_BASE_CLOCK_H

double mn_seconds(void);

#endif
