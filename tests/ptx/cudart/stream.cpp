/* stream.cpp - streams, events and graphs. Work is done when it is asked for; streams and events
 * have an order only while they capture, and are checked then as the runtime would. */
#include <algorithm>

#include "cudart/runtime.h"

namespace cudart {

/* NULL, cudaStreamLegacy and cudaStreamPerThread are one stream here. NULL is returned for what
 * is none. */
static cudaStream_t stream_of(cudaStream_t handle) {
    if ((uintptr_t)handle <= (uintptr_t)cudaStreamPerThread) return &state().default_stream;
    return is_live(handle) ? handle : nullptr;
}

/* Does a work of a stream now, or records it. */
cudaError_t submit(cudaStream_t handle, Work work) {
    cudaStream_t stream = stream_of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (!stream->capture) return work();
    if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    stream->capture->works.push_back(std::move(work));
    stream->seen[stream]++;
    return cudaSuccess;
}

static cudaError_t invalidate(cudaStream_t stream, cudaError_t why) {
    stream->capture->invalid = true;
    return why;
}

/* A question for which the stream's work must have run: not while it is only recorded. */
cudaError_t settled(cudaStream_t handle) {
    cudaStream_t stream = stream_of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    return stream->capture ? invalidate(stream, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

static void join(cudaStream_t stream, const std::shared_ptr<Capture> &capture) {
    stream->capture = capture;
    stream->seen.clear();
    capture->members.push_back(stream);
}

static void leave(cudaStream_t stream) {
    auto &members = stream->capture->members;
    members.erase(std::remove(members.begin(), members.end(), stream), members.end());
    stream->capture.reset();
}

/* Whether the origin waited for all that the other streams do. */
static bool all_joined(const Capture &capture) {
    const Clock &origin = capture.origin->seen;
    return std::all_of(capture.members.begin(), capture.members.end(), [&](cudaStream_t stream) {
        const Clock::const_iterator own = stream->seen.find(stream), waited = origin.find(stream);
        if (own == stream->seen.end()) return true;
        return waited != origin.end() && waited->second >= own->second;
    });
}

static cudaError_t end_capture(cudaStream_t stream, cudaGraph_t *graph) {
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return cudaErrorIllegalState;
    if (capture->origin != stream) return invalidate(stream, cudaErrorStreamCaptureUnmatched);
    const bool joined = all_joined(*capture);
    while (!capture->members.empty()) leave(capture->members.back());
    capture->ended = true;
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!joined) return cudaErrorStreamCaptureUnjoined;
    *graph = new CUgraph_st{ std::move(capture->works) };
    state().live.insert(*graph);
    return cudaSuccess;
}

static cudaError_t record_event(cudaEvent_t event, cudaStream_t stream) {
    event->capture = stream->capture;
    event->recorded = true;
    if (stream->capture) event->seen = stream->seen;
    else event->at = seconds_now();
    return cudaSuccess;
}

/* Waits have a meaning only in a capture: other work has been done when it was asked for. */
static cudaError_t wait_event(cudaStream_t stream, cudaEvent_t event) {
    if (!event->recorded) return cudaSuccess;
    if (!event->capture) {
        return stream->capture ? invalidate(stream, cudaErrorStreamCaptureIsolation) : cudaSuccess;
    }
    if (event->capture->ended) {
        return stream->capture ? invalidate(stream, cudaErrorStreamCaptureIsolation)
                               : cudaErrorCapturedEvent;
    }
    if (!stream->capture) join(stream, event->capture);
    if (stream->capture != event->capture) return invalidate(stream, cudaErrorStreamCaptureMerge);
    for (const auto &[other, count] : event->seen) {
        stream->seen[other] = std::max(stream->seen[other], count);
    }
    return cudaSuccess;
}

static cudaError_t run_all(const std::vector<Work> &works) {
    for (const Work &work : works) {
        const cudaError_t code = work();
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

}    // namespace cudart

using namespace cudart;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int) {
    return on_device([&] {
        if (!out || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
        const cudaError_t code = check_device(0);
        if (code != cudaSuccess) return code;
        *out = new CUstream_st;
        (*out)->flags = flags;
        state().live.insert(*out);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *out) {
    return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return always([&] {
        if (is_live(stream) && stream->capture) {
            stream->capture->invalid = true;
            leave(stream);
        }
        return destroy(stream);
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return on_device([&] { return settled(stream); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return on_device([&] { return settled(stream); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    return on_device([&] {
        cudaStream_t stream = stream_of(handle);
        if (!stream || !is_live(event)) return cudaErrorInvalidResourceHandle;
        return wait_event(stream, event);
    });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    return on_device([&] {
        if (stream_of(stream) == &state().default_stream) return cudaErrorStreamCaptureUnsupported;
        if (!is_live(stream)) return cudaErrorInvalidResourceHandle;
        if (stream->capture) return cudaErrorIllegalState;
        const auto capture = std::make_shared<Capture>();
        capture->origin = stream;
        join(stream, capture);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    return on_device([&] {
        if (!graph) return cudaErrorInvalidValue;
        *graph = nullptr;
        return is_live(stream) ? end_capture(stream, graph) : cudaErrorInvalidResourceHandle;
    });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    return on_device([&] {
        cudaStream_t stream = stream_of(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (!stream->capture) *status = cudaStreamCaptureStatusNone;
        else if (stream->capture->invalid) *status = cudaStreamCaptureStatusInvalidated;
        else *status = cudaStreamCaptureStatusActive;
        return cudaSuccess;
    });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    return on_device([&] {
        if (!out) return cudaErrorInvalidValue;
        *out = new CUevent_st;
        (*out)->timing = (flags & cudaEventDisableTiming) == 0;
        state().live.insert(*out);
        return cudaSuccess;
    });
}

cudaError_t cudaEventCreate(cudaEvent_t *out) {
    return cudaEventCreateWithFlags(out, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return always([&] { return destroy(event); });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    return on_device([&] {
        cudaStream_t stream = stream_of(handle);
        if (!stream || !is_live(event)) return cudaErrorInvalidResourceHandle;
        return record_event(event, stream);
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return on_device([&] {
        if (!is_live(event)) return cudaErrorInvalidResourceHandle;
        return event->capture ? cudaErrorCapturedEvent : cudaSuccess;
    });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return cudaEventSynchronize(event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    return on_device([&] {
        for (cudaEvent_t event : { from, to }) {
            if (!is_live(event) || !event->recorded || !event->timing)
                return cudaErrorInvalidResourceHandle;
            if (event->capture) return cudaErrorCapturedEvent;
        }
        *milliseconds = (float)(1e3 * (to->at - from->at));
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long) {
    return on_device([&] {
        if (!out || !is_live(graph)) return cudaErrorInvalidValue;
        *out = new CUgraphExec_st{ graph->works };
        state().live.insert(*out);
        return cudaSuccess;
    });
}

/* In a capture the graph's works become part of the new one, as copies: this one may be
 * destroyed. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    return on_device([&] {
        if (!is_live(graph)) return cudaErrorInvalidValue;
        cudaStream_t into = stream_of(stream);
        if (!into) return cudaErrorInvalidResourceHandle;
        if (!into->capture) return run_all(graph->works);
        return submit(stream, [works = graph->works] { return run_all(works); });
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return always([&] { return destroy(graph); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    return always([&] { return destroy(graph); });
}

}    // extern "C"
