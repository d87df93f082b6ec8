//! A client's endpoints and bounds, checked before anything is asked.
//!
//! A router finds out at its start that an endpoint cannot work, not with its first
//! request. It opens no socket: whether somebody answers there is found out later.

use std::fmt;
use std::time::Duration;

use tonic::transport::Endpoint;

use super::Credentials;
use crate::limits::{MESSAGE_BYTES_MAX, PREFIX_QUERIES_IN_FLIGHT_DEFAULT};

/// Time that a query has, unless configured: what a router can spare before it
/// had better route by load.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(100);

/// Longest deadline: `grpc-timeout` has eight digits.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Longest that connecting may take. It goes on behind a query that has given up, so
/// that a later one finds the connection.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// How often a quiet connection is tried, and how long an answer may take.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// How a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Servers in order of preference, at least one: `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`.
    pub endpoints: Vec<String>,
    /// How servers are known and what they are shown.
    pub credentials: Credentials,
    /// Time that a query has in all, sent as `grpc-timeout`; not zero, and at most an hour.
    pub deadline: Duration,
    /// Queries under way at once, at least 1; above it a query is refused, never queued.
    pub in_flight_max: usize,
    /// Largest answer that is read, in bytes, at least 1.
    pub answer_bytes_max: usize,
}

impl Config {
    /// A router's defaults: 100 ms, 32 queries in flight, answers up to 8 MiB.
    pub fn with_endpoints(endpoints: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Config {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            credentials: Credentials::default(),
            deadline: DEADLINE_DEFAULT,
            in_flight_max: PREFIX_QUERIES_IN_FLIGHT_DEFAULT,
            answer_bytes_max: MESSAGE_BYTES_MAX,
        }
    }

    /// Checks what is not an endpoint's own.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.endpoints.is_empty() {
            return Err(ConfigError::NoEndpoint);
        }
        // The most that the counter of permits can hold.
        let permits = 1..=tokio::sync::Semaphore::MAX_PERMITS;
        let deadline_fits = !self.deadline.is_zero() && self.deadline <= DEADLINE_MAX;
        if !deadline_fits || !permits.contains(&self.in_flight_max) || self.answer_bytes_max == 0 {
            return Err(ConfigError::Bound);
        }
        Ok(())
    }
}

/// Why a client cannot be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigError {
    /// There is nobody to ask.
    NoEndpoint,
    /// A deadline or bound is zero, or more queries in flight than can be counted.
    Bound,
    /// An endpoint is none of `http://HOST:PORT`, `https://HOST:PORT` and `unix:PATH`.
    Endpoint {
        /// As it was given.
        endpoint: String,
    },
    /// An endpoint asks for TLS, and no authorities are given to know the server by.
    Authorities {
        /// As it was given.
        endpoint: String,
    },
    /// Authorities, certificate or key are no PEM that fits together, or the token is no text of a header.
    Credentials,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::NoEndpoint => f.write_str("no endpoint to ask"),
            ConfigError::Bound => f.write_str("a deadline or bound is zero or too large"),
            ConfigError::Endpoint { endpoint } => {
                write!(
                    f,
                    "{endpoint:?} is no endpoint: it takes http://HOST:PORT, https://HOST:PORT or unix:PATH"
                )
            }
            ConfigError::Authorities { endpoint } => {
                write!(f, "{endpoint:?} asks for TLS, and there are no authorities to know it by")
            }
            ConfigError::Credentials => f.write_str("certificates, key or token cannot be used"),
        }
    }
}

impl std::error::Error for ConfigError {}

/// The connection's settings for an endpoint that can be used.
///
/// # Errors
/// It has another scheme than these three, or no host, or the credentials do not fit it.
pub(crate) fn parse(endpoint: &str, credentials: &Credentials) -> Result<Endpoint, ConfigError> {
    let refused = || ConfigError::Endpoint { endpoint: endpoint.to_owned() };
    let is_tls = endpoint.starts_with("https://");
    let usable = if let Some(path) = endpoint.strip_prefix("unix:") {
        !path.trim_start_matches("//").is_empty()
    } else {
        (is_tls || endpoint.starts_with("http://")) && is_host(&endpoint.parse().map_err(|_| refused())?)
    };
    if !usable {
        return Err(refused());
    }
    let connection = Endpoint::from_shared(endpoint.to_owned()).map_err(|_| refused())?;
    let connection = if is_tls { credentials.secure(connection, endpoint)? } else { connection };
    Ok(connection
        .connect_timeout(CONNECT_MAX)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true))
}

/// Whether a URL is a host and perhaps a port. A path would be sent before the
/// service's name, where no server expects it.
fn is_host(uri: &http::Uri) -> bool {
    let has_host = uri.authority().is_some_and(|authority| {
        // A port that does not fit its 16 bits reads as none.
        !authority.host().is_empty() && (authority.port().is_some() || authority.as_str() == authority.host())
    });
    has_host && matches!(uri.path(), "" | "/") && uri.query().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_endpoints_are_taken() {
        for endpoint in [
            "http://127.0.0.1:1",
            "http://[::1]:50051",
            "http://indexer/",
            "unix:/run/x.sock",
            "unix:///run/x",
        ] {
            assert!(parse(endpoint, &Credentials::default()).is_ok(), "{endpoint}");
        }
    }

    #[test]
    fn unusable_endpoints_are_refused_by_name() {
        for endpoint in [
            "",
            "indexer:50051",
            "127.0.0.1:1",
            "ftp://indexer",
            "HTTP//x",
            "http://",
            "http://:50051",
            "https://:50051",
            "http:///path",
            "http://indexer/path",
            "http://indexer?x",
            "http://in dexer",
            "http://indexer:99999",
            "unix:",
            "unix://",
        ] {
            let error = parse(endpoint, &Credentials::default()).expect_err(endpoint);
            assert_eq!(error, ConfigError::Endpoint { endpoint: endpoint.to_owned() });
            assert!(error.to_string().contains(endpoint));
        }
    }

    #[test]
    fn credentials_that_cannot_work_are_refused_and_never_shown() {
        let none = Credentials::default();
        assert!(matches!(parse("https://indexer", &none), Err(ConfigError::Authorities { .. })));
        let bad = Credentials {
            authorities_pem: Some("-----BEGIN CERTIFICATE-----\nsecret".into()),
            identity_pem: Some(("secret".into(), "secret".into())),
            token: Some("secret\n".into()),
        };
        assert_eq!(parse("https://indexer", &bad).err(), Some(ConfigError::Credentials));
        assert_eq!(bad.bearer().err(), Some(ConfigError::Credentials));
        assert!(!format!("{bad:?}{}", ConfigError::Credentials).contains("secret"));
        assert!(parse("http://indexer", &bad).is_ok(), "they are for https alone");
    }

    #[test]
    fn bounds_of_zero_are_refused() {
        let good = Config::with_endpoints(["http://x"]);
        assert_eq!(good.check(), Ok(()));
        let none: [&str; 0] = [];
        assert_eq!(Config::with_endpoints(none).check(), Err(ConfigError::NoEndpoint));
        for bad in [
            Config { deadline: Duration::ZERO, ..good.clone() },
            Config { deadline: Duration::MAX, ..good.clone() },
            Config { in_flight_max: 0, ..good.clone() },
            Config { in_flight_max: usize::MAX, ..good.clone() },
            Config { answer_bytes_max: 0, ..good.clone() },
        ] {
            assert_eq!(bad.check(), Err(ConfigError::Bound), "{bad:?}");
        }
    }
}
