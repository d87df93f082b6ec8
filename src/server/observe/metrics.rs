//! `/metrics`: every series of the server, with its help.

use std::fmt;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use tonic::Code;

use super::Observer;
use super::record::{CODES, Method};
use super::snapshot::{Snapshot, TIERS};
use crate::metrics::{Writer, expose};
use crate::version;

/// The text of one scrape.
pub(super) fn text(observer: &Arc<Observer>) -> String {
    let observer = Arc::clone(observer);
    let snapshot = observer.snapshots.get();
    expose(move |writer| {
        process(&observer, writer)?;
        calls(&observer, writer)?;
        queries(&observer, writer)?;
        memory(&observer, writer)?;
        index(&snapshot, writer)?;
        silence(&observer, &snapshot, writer)?;
        workers(&snapshot, writer)
    })
}

/// A value without labels.
fn one<T>(value: T) -> [(Vec<(&'static str, &'static str)>, T); 1] {
    [(Vec::new(), value)]
}

fn process(observer: &Observer, writer: &mut Writer<'_>) -> fmt::Result {
    let started = observer.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    writer.gauges(
        "kv_indexer_build_info",
        "Always 1; the labels say which build this is.",
        [(vec![("version", version::NUMBER), ("commit", version::COMMIT)], 1.0)],
    )?;
    writer.gauges(
        "kv_indexer_instance_info",
        "Always 1; the id is this server's in the metadata of its answers, another one after each start.",
        [(vec![("id", observer.instance.as_str())], 1.0)],
    )?;
    writer.gauges("kv_indexer_start_time_seconds", "When the server started, in Unix time.", one(started))?;
    writer.gauges(
        "kv_indexer_ready",
        "1 while the server is ready, 0 while bridges bring it up to date at its start, and while it drains.",
        one(f64::from(u8::from(observer.readiness.is_ready()))),
    )?;
    writer.gauges(
        "kv_indexer_connections",
        "Open gRPC connections.",
        one(observer.recorder.connections.get() as f64),
    )?;
    writer.counters(
        "kv_indexer_connections_accepted",
        "gRPC connections accepted.",
        one(observer.recorder.connections_total.get()),
    )
}

/// Whether a status is shown before it has been answered: those that calls can have by
/// the contract, by load or by a bug. The others would be mostly noise.
fn is_usual(code: Code) -> bool {
    use Code::*;
    match code {
        Ok | Cancelled | InvalidArgument | DeadlineExceeded | PermissionDenied | ResourceExhausted
        | OutOfRange | Internal | Unavailable | Unauthenticated => true,
        Unknown | NotFound | AlreadyExists | FailedPrecondition | Aborted | Unimplemented | DataLoss => false,
    }
}

fn calls(observer: &Observer, writer: &mut Writer<'_>) -> fmt::Result {
    let of = |method| (method, observer.recorder.calls(method));
    let label = |method: Method| ("method", method.name());
    let answers = Method::ALL.map(of).into_iter().flat_map(|(method, calls)| {
        let codes = CODES.iter().zip(&calls.codes).map(|(code, count)| (*code, count.get()));
        let shown = codes.filter(|((code, _), count)| *count > 0 || is_usual(*code));
        shown.map(move |((_, code), count)| (vec![label(method), ("code", code)], count))
    });
    writer.counters(
        "kv_indexer_rpcs",
        "Calls by method and gRPC status; CANCELLED are those whose caller left.",
        answers,
    )?;
    writer.gauges(
        "kv_indexer_rpcs_in_flight",
        "Calls whose headers have arrived and that are not answered yet.",
        Method::ALL.map(of).map(|(method, calls)| (vec![label(method)], calls.in_flight.get() as f64)),
    )?;
    writer.histograms(
        "kv_indexer_rpc_duration_seconds",
        "Time from a call's headers to its answer, the wait for its body included.",
        Method::ALL.map(of).map(|(method, calls)| (vec![label(method)], calls.time.read())),
    )?;
    writer.histograms(
        "kv_indexer_apply_batch_hashes",
        "Block hashes of an applied batch.",
        one(observer.recorder.apply_hashes.read()),
    )
}

fn queries(observer: &Observer, writer: &mut Writer<'_>) -> fmt::Result {
    let (recorder, admission) = (&observer.recorder, &observer.admission);
    writer.counters(
        "kv_indexer_prefix_queries",
        "Prefix queries scanned, by how much of the prompt the best worker can reuse. Were \
         first_block_unknown always so, router and engines would hash or page differently.",
        recorder.outcomes().map(|(outcome, count)| (vec![("matched", outcome.name())], count)),
    )?;
    writer.histograms(
        "kv_indexer_prefix_asked_blocks",
        "Blocks of a prefix query.",
        one(recorder.asked.read()),
    )?;
    writer.histograms(
        "kv_indexer_prefix_matched_blocks",
        "Leading blocks that the best worker can reuse, of a prefix query.",
        one(recorder.matched.read()),
    )?;
    writer.histograms(
        "kv_indexer_scan_duration_seconds",
        "Time of a prefix query's scan, under the index's lock.",
        one(recorder.scans.read()),
    )?;
    writer.histograms(
        "kv_indexer_lock_wait_seconds",
        "Time that a prefix query waited for the index's lock.",
        one(recorder.lock_waits.read()),
    )?;
    writer.counters(
        "kv_indexer_rejections",
        "What was turned away. Prefix queries: overloaded, as all permits were out; late, as their deadline \
         passed. Calls: unauthenticated, not_allowed; memory, as messages on their way took all there is. \
         Connections: handshake; connections, as all places were taken; unresponsive.",
        [("overloaded", admission.overloaded()), ("late", admission.late())]
            .into_iter()
            .chain(recorder.refusals())
            .map(|(reason, count)| (vec![("reason", reason)], count)),
    )?;
    writer.gauges(
        "kv_indexer_prefix_permits",
        "Prefix queries that may run at once.",
        one(admission.limit() as f64),
    )?;
    writer.gauges(
        "kv_indexer_prefix_permits_out",
        "Prefix queries that run or wait for a core.",
        one(admission.running() as f64),
    )
}

fn memory(observer: &Observer, writer: &mut Writer<'_>) -> fmt::Result {
    writer.gauges(
        "kv_indexer_message_memory_bytes",
        "Bytes of messages and answers on their way.",
        one(observer.budget.used() as f64),
    )?;
    writer.gauges(
        "kv_indexer_message_memory_max_bytes",
        "Bytes of messages that may be on their way.",
        one(observer.budget.max() as f64),
    )
}

fn index(snapshot: &Snapshot, writer: &mut Writer<'_>) -> fmt::Result {
    let sizes = &snapshot.sizes;
    writer.gauges("kv_indexer_workers", "Workers known.", one(sizes.workers as f64))?;
    writer.gauges(
        "kv_indexer_workers_shown",
        "Workers with series of their own; more than these are only counted.",
        one(snapshot.workers.len() as f64),
    )?;
    writer.gauges("kv_indexer_blocks", "Distinct blocks held.", one(sizes.blocks as f64))?;
    writer.gauges(
        "kv_indexer_remembered_blocks",
        "Blocks no longer held whose place is remembered.",
        one(sizes.ghosts as f64),
    )?;
    writer.gauges(
        "kv_indexer_placements",
        "Placements, a block of a worker at a tier each.",
        TIERS.iter().zip(snapshot.placements).map(|((_, tier), count)| (vec![("tier", *tier)], count as f64)),
    )?;
    writer.gauges(
        "kv_indexer_placement_sets",
        "Distinct sets of placements that blocks share.",
        one(sizes.sets as f64),
    )?;
    writer.gauges(
        "kv_indexer_block_runs",
        "Runs of neighbouring blocks with one set; blocks per run tell how fragmented the index is.",
        one(sizes.runs as f64),
    )?;
    let tables = [
        ("blocks", sizes.block_bytes),
        ("hashes", sizes.table_bytes),
        ("sets", sizes.set_bytes),
        ("holdings", sizes.holding_bytes),
    ];
    writer.gauges(
        "kv_indexer_memory_bytes",
        "Bytes of the index's tables.",
        tables.map(|(table, bytes)| (vec![("table", table)], bytes as f64)),
    )
}

fn silence(observer: &Observer, snapshot: &Snapshot, writer: &mut Writer<'_>) -> fmt::Result {
    let recorder = &observer.recorder;
    writer.gauges(
        "kv_indexer_silent_workers",
        "Workers that are left out of answers, as nothing was heard of them for KV_INDEXER_WORKER_TTL_MS.",
        one(snapshot.silent as f64),
    )?;
    writer.gauges(
        "kv_indexer_network_suspected",
        "1 while most workers are silent at once, so that none is left out or removed for it.",
        one(recorder.network_suspected.get() as f64),
    )?;
    writer.counters(
        "kv_indexer_workers_removed",
        "Workers removed with their placements, by reason.",
        [
            (vec![("reason", "silence")], recorder.removed_for_silence.get()),
            (vec![("reason", "dropped")], recorder.dropped.get()),
        ],
    )
}

fn workers(snapshot: &Snapshot, writer: &mut Writer<'_>) -> fmt::Result {
    let blocks = snapshot.rows().flat_map(|(label, row)| {
        let tiers = TIERS.iter().zip(row.blocks);
        tiers.map(move |((_, tier), count)| (vec![("worker", label.id()), ("tier", *tier)], count as f64))
    });
    writer.gauges("kv_indexer_worker_blocks", "Blocks that a worker holds at a tier.", blocks)?;
    let silent =
        snapshot.rows().map(|(label, row)| (vec![("worker", label.id())], f64::from(u8::from(row.silent))));
    writer.gauges(
        "kv_indexer_worker_silent",
        "1 while a worker is left out of answers, as it has not been heard for too long.",
        silent,
    )?;
    let info =
        snapshot.rows().map(|(label, _)| (vec![("worker", label.id()), ("address", label.address())], 1.0));
    writer.gauges(
        "kv_indexer_worker_info",
        "Always 1; the labels name a worker and its address, empty if routers are not offered it.",
        info,
    )?;
    let heard =
        || snapshot.rows().filter_map(|(label, row)| Some((vec![("worker", label.id())], row.heard?)));
    writer.gauges(
        "kv_indexer_worker_last_report_timestamp_seconds",
        "When a worker's last report was applied, in Unix time.",
        heard().map(|(labels, heard)| {
            (labels, heard.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64())
        }),
    )?;
    writer.counters(
        "kv_indexer_worker_reports",
        "Reports applied for a worker.",
        heard().map(|(labels, heard)| (labels, heard.reports)),
    )?;
    writer.counters(
        "kv_indexer_worker_report_gaps",
        "Times that a worker's reports skipped a number: one was lost or went elsewhere.",
        heard().map(|(labels, heard)| (labels, heard.gaps)),
    )?;
    writer.counters(
        "kv_indexer_worker_report_restarts",
        "Times that a worker's reports began anew: restarts of its bridge.",
        heard().map(|(labels, heard)| (labels, heard.restarts)),
    )
}
