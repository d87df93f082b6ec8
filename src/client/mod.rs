//! A router's side of the index: ask how much of a prompt each worker can reuse.
//!
//! A router asks one question per request and has little time for it, so a query
//! has a deadline, never queues, and ends in an answer or in an error of a
//! [class](ErrorClass) that says whether to route by load instead. A [`Client`]
//! asks servers over gRPC; an [`Embedded`] asks an index of this process. Both are
//! a [`PrefixIndex`], so a router can choose at its start.
//!
//! | part | what it is |
//! |---|---|
//! | `config` | endpoints and bounds, refused at construction where they cannot work |
//! | `credentials` | TLS and tokens |
//! | `prompt` | a prompt's hashes, encoded once as the request that carries them |
//! | `call` | one attempt at one endpoint |
//! | `health` | which endpoint to ask first; no clock and no socket of its own |
//! | `answer` | matches, read in place from the received bytes |
//! | `error` | the classes of errors |
//! | `embedded` | the same question put to an index of this process |
//!
//! **Failover.** Endpoints are asked in the order they are configured in, those that
//! failed last and only until their time to be tried again comes, when one query
//! tries them. A server that cannot be reached, is too slow or overloaded passes the
//! query on. While another endpoint is left to ask, an attempt may use half of the
//! time that is left, so a server that hangs costs time and not the answer. Fail over only
//! between servers that bridges report alike to.
//!
//! **Bounds.** In flight at once: [`Config::in_flight_max`], above it a query is
//! refused at once. An answer is at most [`Config::answer_bytes_max`]. A prompt of
//! more hashes than a message may have is cut to the leading ones that fit.
//!
//! Cost: a query copies the encoded prompt once per attempt, into the connection's
//! buffer; its answer is a slice of what was received.
//!
//! ```
//! use std::sync::Arc;
//! use sgl_kv_indexer::arena::{Action, Batch, Index, PackedHashes, Tier};
//! use sgl_kv_indexer::client::{Client, Config, Prompt};
//! use sgl_kv_indexer::server;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A server with one worker that holds two blocks.
//! let index = Arc::new(Index::new());
//! let held = PackedHashes::pack(&[11, 22]);
//! let hashes = PackedHashes::new(&held).expect("whole hashes");
//! index.apply(&Batch {
//!     worker_id: "worker-0",
//!     worker_address: "http://10.0.0.1:30000",
//!     cache_spec: None,
//!     seq: 1,
//!     actions: &[Action::Report { tier: Tier::Hbm, hashes, masks: &[], tokens: &[] }],
//! })?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let endpoint = format!("http://{}", listener.local_addr()?);
//! tokio::spawn(server::serve(listener, server::Config::default(), index, std::future::pending()));
//!
//! let client = Client::new(&Config {
//!     deadline: std::time::Duration::from_secs(5),
//!     ..Config::with_endpoints([endpoint])
//! })?;
//! match client.match_prefix(&Prompt::new(&[11, 22, 33, 44])).await {
//!     Ok(answer) => {
//!         let best = answer.best().expect("a worker has the first block");
//!         assert_eq!((best.worker_id, best.address), ("worker-0", "http://10.0.0.1:30000"));
//!         assert_eq!(answer.match_rate(best.blocks), 0.5);
//!     }
//!     Err(error) if error.class.falls_back() => panic!("route by load: {error}"),
//!     Err(error) => panic!("fail the request: {error}"),
//! }
//! # Ok(())
//! # }
//! ```

/// The guide "from a prompt to a routing decision", whose examples are tested with the rest.
#[cfg(doctest)]
#[doc = include_str!("../../docs/ROUTING.md")]
pub struct RoutingGuide;

mod answer;
mod call;
mod config;
mod credentials;
mod embedded;
mod error;
mod health;
mod prompt;

use std::pin::Pin;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

pub(crate) use call::{AUTHORIZATION, Raw, reason};
pub(crate) use config::parse as endpoint;

pub use answer::{Answer, Malformed, Match, Matches};
pub use config::{Config, ConfigError};
pub use credentials::Credentials;
pub use embedded::Embedded;
pub use error::{ErrorClass, QueryError};
pub use prompt::{HASHES_PER_QUERY_MAX, Prompt};

use call::Server;
use health::Health;

/// A future of an answer.
pub type Asked<'a> = Pin<Box<dyn Future<Output = Result<Answer, QueryError>> + Send + 'a>>;

/// Whoever can say how much of a prompt each worker can reuse.
pub trait PrefixIndex: Send + Sync {
    /// Asks how many leading blocks of `prompt` each worker can reuse.
    ///
    /// The future's error has the class that says what to do without an answer.
    fn match_prefix<'a>(&'a self, prompt: &'a Prompt) -> Asked<'a>;
}

/// Asks servers over gRPC.
///
/// Nothing is connected before the first query, which has to come from inside a
/// tokio runtime; the connections belong to that runtime.
#[derive(Debug)]
pub struct Client {
    servers: Vec<Server>,
    health: Mutex<Health>,
    permits: Semaphore,
    deadline: std::time::Duration,
}

/// One endpoint and how it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointHealth<'a> {
    /// As it was configured.
    pub endpoint: &'a str,
    /// Attempts that have failed since the last one that did not; 0 is healthy.
    pub failures: u32,
}

impl Client {
    /// A client of these endpoints; connects to none of them yet.
    ///
    /// # Errors
    /// There is no endpoint, one of them cannot be used, or a bound is zero.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        config.check()?;
        let server = |endpoint: &String| Server::new(endpoint, config);
        let servers = config.endpoints.iter().map(server).collect::<Result<Vec<_>, _>>()?;
        Ok(Client {
            health: Mutex::new(Health::new(servers.len())),
            servers,
            permits: Semaphore::new(config.in_flight_max),
            deadline: config.deadline,
        })
    }

    /// Asks how many leading blocks of `prompt` each worker can reuse.
    ///
    /// A prompt without hashes is answered with nothing and asks nobody. Dropping the
    /// future gives the query up.
    ///
    /// # Errors
    /// No endpoint answered in time; the class of the last attempt's error.
    pub async fn match_prefix(&self, prompt: &Prompt) -> Result<Answer, QueryError> {
        if prompt.is_empty() {
            return Ok(Answer::default());
        }
        let Ok(_permit) = self.permits.try_acquire() else {
            return Err(QueryError::here(ErrorClass::Overloaded, "too many queries in flight"));
        };
        let began = Instant::now();
        let order = self.health.lock().order(began);
        let mut failed = None;
        for (asked, &number) in order.iter().enumerate() {
            let left = self.deadline.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            let is_last = asked + 1 == order.len();
            let error = match self.servers[number].ask(prompt, if is_last { left } else { left / 2 }).await {
                Ok(answer) => {
                    self.health.lock().answered(number);
                    return Ok(answer);
                }
                Err(error) => error,
            };
            match error.class {
                ErrorClass::Unreachable | ErrorClass::Timeout => {
                    self.health.lock().failed(number, Instant::now());
                }
                // It answers, and soon it may have room again.
                ErrorClass::Overloaded => self.health.lock().answered(number),
                // Another server would say the same.
                ErrorClass::TooLarge | ErrorClass::Rejected => return Err(error),
            }
            failed = Some(error);
        }
        Err(failed.unwrap_or_else(|| QueryError::here(ErrorClass::Timeout, "no time was left to ask")))
    }

    /// Every endpoint in configured order, with how it does: for metrics.
    pub fn endpoints(&self) -> Vec<EndpointHealth<'_>> {
        let health = self.health.lock();
        let servers = self.servers.iter().enumerate();
        servers
            .map(|(number, server)| EndpointHealth {
                endpoint: server.endpoint(),
                failures: health.failures(number),
            })
            .collect()
    }
}

impl PrefixIndex for Client {
    fn match_prefix<'a>(&'a self, prompt: &'a Prompt) -> Asked<'a> {
        Box::pin(self.match_prefix(prompt))
    }
}
