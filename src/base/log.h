/* log.h - messages of the program (never of the library): level, sentence, standard error. */
#ifndef MN_BASE_LOG_H
#define MN_BASE_LOG_H

typedef enum mn_log_level { MN_LOG_ERROR, MN_LOG_WARNING, MN_LOG_INFO, MN_LOG_DEBUG } mn_log_level;

/* Messages above `level` are dropped; starts at MN_LOG_INFO. */
void mn_log_set_level(mn_log_level level);
void mn_log(mn_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
