//! The server's settings: one table makes its flags, help and variables.

use std::net::SocketAddr;
use std::time::Duration;

use super::admission::PERMITS_MAX;
use super::security;
use crate::http;
use crate::limits::PREFIX_QUERIES_IN_FLIGHT_DEFAULT;
use crate::settings::{LOG_FILTER, LOG_FORMAT, Setting, SettingError, Settings};

const LISTEN_ADDR: Setting = Setting {
    name: "KV_INDEXER_LISTEN_ADDR",
    value: "ADDR",
    default: Some("[::1]:50051"),
    help: "IP address and port to listen on.",
};

const PREFIX_QUERY_MAX_INFLIGHT: Setting = Setting {
    name: "KV_INDEXER_PREFIX_QUERY_MAX_INFLIGHT",
    value: "COUNT",
    default: Some("32"),
    help: "Prefix queries that may run at once; above it a query is refused, never queued.",
};

const HTTP_ADDR: Setting = Setting {
    name: "KV_INDEXER_HTTP_ADDR",
    value: "ADDR|off",
    default: Some("[::1]:9464"),
    help: "IP address and port of the status page, the probes /healthz and /readyz, /metrics and /debug/state; \
           off for none.",
};

const TRACE_CONTEXT: Setting = Setting {
    name: "KV_INDEXER_TRACE_CONTEXT",
    value: "on|off",
    default: Some("off"),
    help: "Whether each call runs in a span with the ids of its caller's traceparent; log lines show them at \
           level debug.",
};

const CONNECTIONS_MAX: Setting = Setting {
    name: "KV_INDEXER_CONNECTIONS_MAX",
    value: "COUNT",
    default: Some("1024"),
    help: "gRPC connections at once; a further one is closed as it is accepted.",
};

const MESSAGE_MEMORY_MIB: Setting = Setting {
    name: "KV_INDEXER_MESSAGE_MEMORY_MIB",
    value: "MIB",
    default: Some("512"),
    help: "Memory in MiB that messages on their way may take over all connections; a message beyond it is refused \
           with RESOURCE_EXHAUSTED. At least 8, the largest message.",
};

const WORKER_TTL_MS: Setting = Setting {
    name: "KV_INDEXER_WORKER_TTL_MS",
    value: "MS",
    default: Some("0"),
    help: "Milliseconds after which a worker that does not report, not even an empty batch, is left out of \
           answers, and after as many more removed; 0 is never.",
};

const SETTLE_MS: Setting = Setting {
    name: "KV_INDEXER_SETTLE_MS",
    value: "MS",
    default: Some("3000"),
    help: "Milliseconds after its start that bridges have to find the server before it can be ready; then it \
           waits until they have brought it up to date. 0 makes it ready at once.",
};

/// Shortest time to live: bridges cannot report much more often.
const WORKER_TTL_MS_MIN: u64 = 100;

/// All settings of the server's binary.
pub const SETTINGS: &[Setting] = &{
    let [cert, key, client_ca, query_tokens, apply_tokens, query_names, apply_names] = security::SETTINGS;
    [
        LISTEN_ADDR,
        PREFIX_QUERY_MAX_INFLIGHT,
        CONNECTIONS_MAX,
        MESSAGE_MEMORY_MIB,
        WORKER_TTL_MS,
        SETTLE_MS,
        HTTP_ADDR,
        cert,
        key,
        client_ca,
        query_tokens,
        apply_tokens,
        query_names,
        apply_names,
        TRACE_CONTEXT,
        LOG_FORMAT,
        LOG_FILTER,
    ]
};

/// How a server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Where the binary listens; [`serve`](super::serve) is given its listener.
    pub listen_addr: SocketAddr,
    /// Prefix queries that may run at once, at least 1.
    pub prefix_queries_in_flight_max: usize,
    /// gRPC connections at once, at least 1.
    pub connections_max: usize,
    /// Bytes of messages that may be on their way over all connections, at least
    /// [`MESSAGE_BYTES_MAX`](crate::limits::MESSAGE_BYTES_MAX).
    pub message_memory_bytes: usize,
    /// Silence after which a worker is left out of answers, and once more after which it is removed;
    /// `None` is never.
    pub worker_ttl: Option<Duration>,
    /// Time that bridges have to find the server before it can be ready; zero makes it ready at once.
    pub settle: Duration,
    /// Where the binary serves HTTP, if it does; see [`Server::with_http`](super::Server::with_http).
    pub http_addr: Option<SocketAddr>,
    /// Whether calls run in spans with their callers' trace context.
    pub trace_context: bool,
}

impl Config {
    /// Reads the settings.
    ///
    /// # Errors
    /// One of them has a value that it does not take.
    pub fn from_settings(settings: &Settings) -> Result<Self, SettingError> {
        let address = "an IP address and a port, such as [::1]:50051 or 0.0.0.0:50051";
        let count = format!("a whole number from 1 to {PERMITS_MAX}");
        let ttl = format!("0 for never, or a whole number of milliseconds from {WORKER_TTL_MS_MIN} on");
        Ok(Config {
            listen_addr: settings.parse(&LISTEN_ADDR, address, |text| text.parse().ok())?,
            prefix_queries_in_flight_max: settings.parse(&PREFIX_QUERY_MAX_INFLIGHT, &count, |text| {
                text.parse().ok().filter(|count| (1..=PERMITS_MAX).contains(count))
            })?,
            connections_max: settings.parse(&CONNECTIONS_MAX, &count, |text| {
                text.parse().ok().filter(|count| (1..=PERMITS_MAX).contains(count))
            })?,
            message_memory_bytes: settings.parse(
                &MESSAGE_MEMORY_MIB,
                "a whole number of MiB from 8 to 1048576",
                |text| {
                    text.parse().ok().filter(|mib| (8..=1 << 20).contains(mib)).map(|mib: usize| mib << 20)
                },
            )?,
            worker_ttl: settings.parse(&WORKER_TTL_MS, &ttl, |text| match text.parse().ok()? {
                0 => Some(None),
                ms => (ms >= WORKER_TTL_MS_MIN).then(|| Some(Duration::from_millis(ms))),
            })?,
            settle: settings.parse(&SETTLE_MS, "a whole number of milliseconds", |text| {
                text.parse().ok().map(Duration::from_millis)
            })?,
            http_addr: http::address(settings, &HTTP_ADDR)?,
            trace_context: settings.parse(&TRACE_CONTEXT, "on or off", |text| match text {
                "on" => Some(true),
                "off" => Some(false),
                _ => None,
            })?,
        })
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            listen_addr: SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), 50051),
            prefix_queries_in_flight_max: PREFIX_QUERIES_IN_FLIGHT_DEFAULT,
            connections_max: 1_024,
            message_memory_bytes: 512 << 20,
            worker_ttl: None,
            settle: Duration::from_secs(3),
            http_addr: Some(SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), 9464)),
            trace_context: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&'static str, &'static str)]) -> Result<Config, SettingError> {
        Config::from_settings(&Settings::from_pairs(pairs.iter().copied()))
    }

    #[test]
    fn the_table_and_the_default_agree() {
        assert_eq!(read(&[]), Ok(Config::default()));
    }

    #[test]
    fn values_are_taken() {
        let config = read(&[
            ("KV_INDEXER_LISTEN_ADDR", "0.0.0.0:9"),
            ("KV_INDEXER_PREFIX_QUERY_MAX_INFLIGHT", "1"),
            ("KV_INDEXER_CONNECTIONS_MAX", "2"),
            ("KV_INDEXER_MESSAGE_MEMORY_MIB", "8"),
            ("KV_INDEXER_WORKER_TTL_MS", "2500"),
            ("KV_INDEXER_SETTLE_MS", "0"),
            ("KV_INDEXER_HTTP_ADDR", "off"),
            ("KV_INDEXER_TRACE_CONTEXT", "on"),
        ]);
        let expected = Config {
            listen_addr: ([0, 0, 0, 0], 9).into(),
            prefix_queries_in_flight_max: 1,
            connections_max: 2,
            message_memory_bytes: 8 << 20,
            worker_ttl: Some(Duration::from_millis(2_500)),
            settle: Duration::ZERO,
            http_addr: None,
            trace_context: true,
        };
        assert_eq!(config, Ok(expected));
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        for (name, values) in [
            (
                "KV_INDEXER_LISTEN_ADDR",
                &["50051", "localhost:1", "::1:50051", "1.2.3.4", "1.2.3.4:65536"][..],
            ),
            (
                "KV_INDEXER_PREFIX_QUERY_MAX_INFLIGHT",
                &["0", "-1", "many", "1.5", " 32", "18446744073709551615", "99999999999999999999"],
            ),
            ("KV_INDEXER_TRACE_CONTEXT", &["true", "ON"]),
            ("KV_INDEXER_CONNECTIONS_MAX", &["0", "all"]),
            ("KV_INDEXER_MESSAGE_MEMORY_MIB", &["7", "1048577", "8MiB", "-8"]),
            ("KV_INDEXER_WORKER_TTL_MS", &["-1", "1", "99", "1s", "never", "18446744073709551616"]),
            ("KV_INDEXER_SETTLE_MS", &["-1", "off", "3s", "1.5"]),
            ("KV_INDEXER_HTTP_ADDR", &["9464", "localhost:9464", "none", "OFF"]),
        ] {
            for value in values {
                let error = read(&[(name, value)]).unwrap_err();
                assert_eq!((error.name, error.value.as_deref()), (name, Some(*value)));
            }
        }
    }
}
