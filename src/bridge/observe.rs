//! What a bridge shows of itself: metrics, state, probes, a page.
//!
//! Everything is made from [`Statuses`], copies of what the streams wrote down, so
//! a reader costs a stream no more than a copy. It reads no socket and no clock
//! but for the age of what it shows.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::config::HTTP_ADDR;
use super::health::{Health, Incomplete};
use super::status::{ServerStatus, Statuses, StreamStatus};
use crate::http::{self, Page, Pages, STATUS_PAGE};
use crate::metrics::{Writer, expose};
use crate::settings::{SettingError, Settings};
use crate::version;

/// Where the binary serves HTTP, if it does.
///
/// # Errors
/// The setting is neither an address nor `off`.
pub fn http_addr(settings: &Settings) -> Result<Option<SocketAddr>, SettingError> {
    http::address(settings, &HTTP_ADDR)
}

/// The pages of a bridge's HTTP port.
///
/// `/readyz` is 200 while every stream is followed: a stream that ended needs
/// somebody to look. A publisher or server that is away does not, the bridge waits
/// for both.
pub fn pages(statuses: Statuses) -> Pages {
    let started = SystemTime::now();
    Arc::new(move |path| {
        let page = match path {
            "/" => Page::html(STATUS_PAGE),
            "/healthz" => Page::probe(true, "ok"),
            "/readyz" if is_ready(&statuses.snapshot()) => Page::probe(true, "ready"),
            "/readyz" => Page::probe(false, "a stream has ended"),
            "/metrics" => Page::metrics(text(statuses.snapshot(), started)),
            "/debug/state" => Page::json(state(&statuses.snapshot(), started).to_string()),
            _ => return None,
        };
        Some(page)
    })
}

fn is_ready(streams: &[StreamStatus]) -> bool {
    streams.iter().all(|stream| stream.ended.is_none())
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn name(why: Incomplete) -> &'static str {
    match why {
        Incomplete::Gap => "gap",
        Incomplete::JoinedLate => "joined_late",
        Incomplete::Undecodable => "undecodable",
        Incomplete::ForeignRank => "foreign_rank",
        Incomplete::Uncounted => "uncounted",
        Incomplete::Withdrawn => "withdrawn",
        Incomplete::Full => "full",
    }
}

/// What went wrong on a stream, by kind.
fn faults(health: &Health) -> [(&'static str, u64); 20] {
    [
        ("foreign_messages", health.foreign_messages),
        ("undecodable_batches", health.undecodable_batches),
        ("undecodable_events", health.undecodable_events),
        ("unknown_tags", health.unknown_tags),
        ("unknown_media", health.unknown_media),
        ("unknown_components", health.unknown_components),
        ("unknown_groups", health.unknown_groups),
        ("gaps", health.gaps),
        ("missing_batches", health.missing_batches),
        ("repaired_batches", health.repaired_batches),
        ("dropped_batches", health.dropped_batches),
        ("replay_failures", health.replay_failures),
        ("restarts", health.restarts),
        ("repeats", health.repeats),
        ("foreign_ranks", health.foreign_ranks),
        ("uncounted_blocks", health.uncounted_blocks),
        ("left_out_blocks", health.left_out_blocks),
        ("mirror_file_errors", health.mirror_file_errors),
        ("disconnects", health.disconnects),
        ("withdrawals", health.withdrawals),
    ]
}

/// `/metrics`.
fn text(streams: Vec<StreamStatus>, started: SystemTime) -> String {
    expose(move |writer| {
        let build = vec![("version", version::NUMBER), ("commit", version::COMMIT)];
        writer.gauges(
            "kv_indexer_bridge_build_info",
            "Always 1; the labels say which build this is.",
            [(build, 1.0)],
        )?;
        writer.gauges(
            "kv_indexer_bridge_start_time_seconds",
            "When the bridge started, in Unix time.",
            [(Vec::new(), seconds(started))],
        )?;
        gauges(&streams, writer)?;
        counters(&streams, writer)
    })
}

/// A gauge of each stream.
type Gauge = (&'static str, &'static str, fn(&StreamStatus) -> f64);

const GAUGES: [Gauge; 5] = [
    ("followed", "1 while the stream is followed, 0 once it has ended.", |stream| {
        flag(stream.ended.is_none())
    }),
    ("connected", "1 while the engine's publisher is connected.", |stream| flag(stream.health.connected)),
    (
        "complete",
        "1 while nothing is known to be missing; at 0, answers about the worker may promise too much or little.",
        |stream| flag(stream.health.incomplete.is_none()),
    ),
    ("repairing", "1 while missing batches are asked for.", |stream| flag(stream.repairing)),
    ("last_sequence", "Number of the last batch applied; -1 before the first.", |stream| {
        stream.last_sequence.map_or(-1.0, |last| last as f64)
    }),
];

/// A gauge of each server of each stream.
type ServerGauge = (&'static str, &'static str, fn(&ServerStatus) -> f64);

const SERVER_GAUGES: [ServerGauge; 4] = [
    ("synchronised", "1 while the server knows everything but what waits for it.", |server| {
        flag(server.synchronised)
    }),
    ("pending_bytes", "Most bytes of changes that wait for the server.", |server| {
        server.pending_bytes as f64
    }),
    ("failures", "Attempts in a row that the server did not take; 0 while it does.", |server| {
        server.failures as f64
    }),
    ("refused", "1 once the server has refused a batch for good and is told nothing any more.", |server| {
        flag(server.refused)
    }),
];

/// A counter of each server of each stream.
type ServerCount = (&'static str, &'static str, fn(&ServerStatus) -> u64);

const SERVER_COUNTERS: [ServerCount; 2] = [
    ("rpcs", "Reports that the server has taken.", |server| server.sent_rpcs),
    ("synchronisations", "Times that the server was told everything anew.", |server| server.synchronisations),
];

/// A row for each server of each stream.
fn server_rows<T>(
    streams: &[StreamStatus],
    value: fn(&ServerStatus) -> T,
) -> impl Iterator<Item = (Vec<(&str, &str)>, T)> {
    streams.iter().flat_map(move |stream| {
        let labels = |server| vec![("worker", &*stream.worker_id), ("server", server)];
        stream.servers.iter().map(move |server| (labels(&*server.server), value(server)))
    })
}

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

fn gauges(streams: &[StreamStatus], writer: &mut Writer<'_>) -> fmt::Result {
    for (name, help, value) in GAUGES {
        let rows = streams.iter().map(|stream| (vec![("worker", &*stream.worker_id)], value(stream)));
        writer.gauges(&format!("kv_indexer_bridge_stream_{name}"), help, rows)?;
    }
    for (name, help, value) in SERVER_GAUGES {
        writer.gauges(&format!("kv_indexer_bridge_server_{name}"), help, server_rows(streams, value))?;
    }
    let incomplete = streams.iter().filter_map(|stream| {
        let (since, why) = stream.health.incomplete?;
        Some((vec![("worker", &*stream.worker_id), ("why", name(why))], seconds(since)))
    });
    writer.gauges(
        "kv_indexer_bridge_stream_incomplete_since_timestamp_seconds",
        "Since when a stream is incomplete, in Unix time, and why; complete ones have no series.",
        incomplete,
    )
}

/// A counter of each stream.
type Count = (&'static str, &'static str, fn(&StreamStatus) -> u64);

const COUNTERS: [Count; 3] = [
    ("batches", "Batches applied.", |stream| stream.health.batches),
    ("events", "Events applied.", |stream| stream.health.events),
    ("payload_bytes", "Payload bytes of the batches applied.", |stream| stream.health.payload_bytes),
];

fn counters(streams: &[StreamStatus], writer: &mut Writer<'_>) -> fmt::Result {
    for (name, help, value) in COUNTERS {
        let rows = streams.iter().map(|stream| (vec![("worker", &*stream.worker_id)], value(stream)));
        writer.counters(&format!("kv_indexer_bridge_stream_{name}"), help, rows)?;
    }
    for (name, help, value) in SERVER_COUNTERS {
        writer.counters(&format!("kv_indexer_bridge_server_{name}"), help, server_rows(streams, value))?;
    }
    let rows = streams.iter().flat_map(|stream| {
        let faults = faults(&stream.health).into_iter();
        faults.map(|(fault, count)| (vec![("worker", &*stream.worker_id), ("fault", fault)], count))
    });
    writer.counters("kv_indexer_bridge_stream_faults", "What went wrong on a stream, by kind.", rows)
}

fn server_state(server: &ServerStatus) -> Value {
    json!({
        "server": &*server.server,
        "synchronised": server.synchronised,
        "synchronisations": server.synchronisations,
        "pending_bytes": server.pending_bytes,
        "sent_rpcs": server.sent_rpcs,
        "failures": server.failures,
        "refused": server.refused,
    })
}

/// `/debug/state`.
fn state(streams: &[StreamStatus], started: SystemTime) -> Value {
    let rows = streams.iter().map(|stream| {
        let StreamStatus { health, .. } = stream;
        let faults = faults(health).into_iter().map(|(fault, count)| (fault.to_owned(), Value::from(count)));
        let incomplete = health.incomplete;
        json!({
            "worker": &*stream.worker_id,
            "address": &*stream.worker_address,
            "source": &*stream.endpoint,
            "replay": stream.replay_endpoint.as_deref(),
            "servers": stream.servers.iter().map(server_state).collect::<Vec<_>>(),
            "rank": stream.rank,
            "connected": health.connected,
            "incomplete": incomplete.map(|(since, why)| json!({ "since_s": seconds(since), "why": name(why) })),
            "last_sequence": stream.last_sequence,
            "repairing": stream.repairing,
            "batches": health.batches,
            "events": health.events,
            "payload_bytes": health.payload_bytes,
            "ended": stream.ended.as_deref(),
            "faults": faults.collect::<Map<_, _>>(),
        })
    });
    json!({
        "kind": "bridge",
        "version": version::NUMBER,
        "commit": version::COMMIT,
        "now_s": seconds(SystemTime::now()),
        "started_s": seconds(started),
        "ready": is_ready(streams),
        "streams": rows.collect::<Vec<_>>(),
    })
}
