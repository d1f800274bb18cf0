/* launch.h - which rank a process is: told by a launcher's variables, or started here.
 *
 *   variables                                            set by
 *   RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT   torchrun --no-python, people
 *   OMPI_COMM_WORLD_RANK _SIZE _LOCAL_RANK               mpirun of Open MPI
 *   PMI_RANK PMI_SIZE MPI_LOCALRANKID                    mpirun of MPICH
 *   SLURM_PROCID SLURM_NTASKS SLURM_LOCALID              srun
 *   MNEME_TOKEN MNEME_PORT                               people: the run's secret; another port */
#ifndef MN_RANKS_LAUNCH_H
#define MN_RANKS_LAUNCH_H

#include "ranks/comm.h"

/* What the variables say; world is 1 where they say nothing. `transport` NULL: MPI where a launcher
 * of MPI started this and its library opens, else TCP. The texts are those of the environment. */
mn_status mn_launch_read(mn_comm_options *how, const char *transport);

/* Starts `n` local ranks by forking, before any thread is made. In each of them *parent is false
 * and the variables are set, with a fresh token, so that mn_launch_read finds them; rank 0 inherits
 * a listening socket. In the parent, after all have ended, *parent is true and *status the exit
 * status: that of the first rank that failed. */
mn_status mn_launch_local(int n, bool *parent, int *status);

#endif
