//! The server's settings: one table makes its flags, help and variables.

use std::net::SocketAddr;

use super::admission::PERMITS_MAX;
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

/// All settings of the server's binary.
pub const SETTINGS: &[Setting] = &[LISTEN_ADDR, PREFIX_QUERY_MAX_INFLIGHT, HTTP_ADDR, LOG_FORMAT, LOG_FILTER];

/// How a server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Where the binary listens; [`serve`](super::serve) is given its listener.
    pub listen_addr: SocketAddr,
    /// Prefix queries that may run at once, at least 1.
    pub prefix_queries_in_flight_max: usize,
    /// Where the binary serves HTTP, if it does; see [`Server::with_http`](super::Server::with_http).
    pub http_addr: Option<SocketAddr>,
}

impl Config {
    /// Reads the settings.
    ///
    /// # Errors
    /// One of them has a value that it does not take.
    pub fn from_settings(settings: &Settings) -> Result<Self, SettingError> {
        let address = "an IP address and a port, such as [::1]:50051 or 0.0.0.0:50051";
        let count = format!("a whole number from 1 to {PERMITS_MAX}");
        Ok(Config {
            listen_addr: settings.parse(&LISTEN_ADDR, address, |text| text.parse().ok())?,
            prefix_queries_in_flight_max: settings.parse(&PREFIX_QUERY_MAX_INFLIGHT, &count, |text| {
                text.parse().ok().filter(|count| (1..=PERMITS_MAX).contains(count))
            })?,
            http_addr: http::address(settings, &HTTP_ADDR)?,
        })
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            listen_addr: SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), 50051),
            prefix_queries_in_flight_max: PREFIX_QUERIES_IN_FLIGHT_DEFAULT,
            http_addr: Some(SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), 9464)),
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
            ("KV_INDEXER_HTTP_ADDR", "off"),
        ]);
        let expected = Config {
            listen_addr: ([0, 0, 0, 0], 9).into(),
            prefix_queries_in_flight_max: 1,
            http_addr: None,
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
            ("KV_INDEXER_HTTP_ADDR", &["9464", "localhost:9464", "none", "OFF"]),
        ] {
            for value in values {
                let error = read(&[(name, value)]).unwrap_err();
                assert_eq!((error.name, error.value.as_deref()), (name, Some(*value)));
            }
        }
    }
}
