/* report.h - report.md and CSV files from a results.json, and from nothing else. */
#ifndef MN_EXPERIMENTS_REPORT_H
#define MN_EXPERIMENTS_REPORT_H

#include "io/json.h"
#include "mneme.h"

/* Writes FOLDER/report.md, runs.csv (a line a run) and table-N.csv (a line a cell). */
mn_status mn_report_write(const mn_json *results, const char *folder);

#endif
