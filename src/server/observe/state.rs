//! `/debug/state`: all of it as JSON, for the page and for people.
//!
//! Counts are totals since the start, so whoever asks twice has rates. The shape
//! may grow; metrics are the interface to rely on.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::Observer;
use super::record::{CODES, Method};
use super::snapshot::{Snapshot, TIERS, WorkerRow};
use crate::arena::{CacheSpec, Label};
use crate::server::readiness::Stream;
use crate::version;

/// The state as text.
pub(super) fn json(observer: &Observer) -> String {
    let now = SystemTime::now();
    let snapshot = observer.snapshots.get();
    let recorder = &observer.recorder;
    let state = json!({
        "kind": "server",
        "version": version::NUMBER,
        "commit": version::COMMIT,
        "instance": observer.instance.as_str(),
        "now_s": seconds(now),
        "started_s": seconds(observer.started),
        "ready": observer.readiness.is_ready(),
        "readiness": observer.readiness.standing().to_string(),
        "network_suspected": recorder.network_suspected.get() > 0,
        "workers_removed": {
            "silence": recorder.removed_for_silence.get(),
            "dropped": recorder.dropped.get(),
        },
        "message_memory": { "bytes": observer.budget.used(), "max": observer.budget.max() },
        "connections": recorder.connections.get(),
        "index": index(&snapshot),
        "workers": snapshot.rows().map(|(label, row)| worker(label, row)).collect::<Vec<_>>(),
        "calls": calls(observer),
        "queries": {
            "outcomes": named(recorder.outcomes().map(|(outcome, count)| (outcome.name(), count))),
            "asked_blocks": recorder.asked.read().json(),
            "matched_blocks": recorder.matched.read().json(),
            "scan_s": recorder.scans.read().json(),
            "lock_wait_s": recorder.lock_waits.read().json(),
            "permits": observer.admission.limit(),
            "permits_out": observer.admission.running(),
        },
        "apply_hashes": recorder.apply_hashes.read().json(),
        "rejections": named(
            [("overloaded", observer.admission.overloaded()), ("late", observer.admission.late())]
                .into_iter()
                .chain(recorder.refusals()),
        ),
    });
    state.to_string()
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn named<'a>(counts: impl IntoIterator<Item = (&'a str, u64)>) -> Value {
    counts
        .into_iter()
        .map(|(name, count)| (name.to_owned(), Value::from(count)))
        .collect::<Map<_, _>>()
        .into()
}

fn tiers(blocks: [u64; 3]) -> Value {
    named(TIERS.iter().zip(blocks).map(|((_, tier), count)| (*tier, count)))
}

fn index(snapshot: &Snapshot) -> Value {
    let sizes = &snapshot.sizes;
    json!({
        "workers": sizes.workers,
        "silent_workers": snapshot.silent,
        "blocks": sizes.blocks,
        "remembered_blocks": sizes.ghosts,
        "placements": tiers(snapshot.placements),
        "placement_sets": sizes.sets,
        "runs": sizes.runs,
        "bytes": {
            "blocks": sizes.block_bytes,
            "hashes": sizes.table_bytes,
            "sets": sizes.set_bytes,
            "holdings": sizes.holding_bytes,
        },
    })
}

fn worker(label: &Label, row: &WorkerRow) -> Value {
    json!({
        "id": label.id(),
        "address": label.address(),
        "spec": row.spec.map(spec),
        "blocks": tiers(row.blocks),
        "silent": row.silent,
        "stream": row.heard.and_then(|heard| heard.stream()).map(|stream| match stream {
            Stream::Synchronising => "synchronising",
            Stream::Synchronised => "synchronised",
        }),
        "seq": row.seq,
        "heard_s": row.heard.map(|heard| seconds(heard.at)),
        "reports": row.heard.map(|heard| heard.reports),
        "report_gaps": row.heard.map(|heard| heard.gaps),
        "report_restarts": row.heard.map(|heard| heard.restarts),
    })
}

fn spec(spec: CacheSpec) -> Value {
    let names = [(CacheSpec::FULL, "full"), (CacheSpec::SWA, "swa"), (CacheSpec::MAMBA, "mamba")];
    let components = names.iter().filter(|(bit, _)| spec.components & bit != 0).map(|(_, name)| *name);
    json!({
        "version": spec.version,
        "components": components.collect::<Vec<_>>(),
        "swa_window_tokens": spec.swa_window_tokens,
    })
}

fn calls(observer: &Observer) -> Value {
    let rows = Method::ALL.map(|method| {
        let calls = observer.recorder.calls(method);
        let codes = CODES.iter().zip(&calls.codes).map(|((_, name), count)| (*name, count.get()));
        let row = json!({
            "codes": named(codes.filter(|(_, count)| *count > 0)),
            "in_flight": calls.in_flight.get(),
            "duration_s": calls.time.read().json(),
        });
        (method.name().to_owned(), row)
    });
    rows.into_iter().collect::<Map<_, _>>().into()
}
