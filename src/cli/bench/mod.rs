//! `bench`: a load generator for any server of the contract or for a bridge, and a server that does nothing.
//!
//! Closed loop: each of so many clients sends its next call when it has the answer to
//! the last. Open loop (`--rate`): calls leave at fixed times whatever the server does,
//! and latency counts from the time a call should have left, so that a stall shows in
//! every call that it delayed. Both end after a fixed time.
//!
//! It fills the server with workers and blocks that it made up, so it refuses a server
//! on another machine unless told; no router should ask a server that was benched. Rows
//! are columns apart by tabs, for scripts: `perf/` has those that pin and compare.
//!
//! | part | what it is |
//! |---|---|
//! | `plan` | what is sent, by number, and what the right answers are |
//! | `load` | when it is sent, and what came of it |
//! | `noop` | the server that does nothing |
//! | `flood` | a publisher that never rests, for a bridge |

mod flood;
mod load;
mod noop;
mod plan;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use http::Uri;
use tokio::net::TcpListener;

use super::remote::{self, failed};
use super::{Environment, Failure, Outcome, output};
use load::{Load, Tallies};
use plan::{Call, Kind, Mode, Plan, Sizes};

#[derive(Debug, Subcommand)]
pub(super) enum Bench {
    /// Sends prefix queries.
    Query(Run),
    /// Sends reports of 32 new blocks.
    Fill(Run),
    /// Sends nine queries to one apply of 32 blocks.
    Mixed(Run),
    /// Sends the same, and one call of a hundred is a long query.
    LongScan(Run),
    /// Serves answers of the right size and does nothing else.
    Noop(Noop),
    /// Floods one bridge with an engine's events, as fast as it reads them.
    Flood(Flood),
}

#[derive(Debug, Args)]
struct Prompts {
    /// Blocks of a prompt.
    #[arg(long, default_value = "2000", value_parser = at_least_one())]
    blocks: u64,
    /// Workers that hold each prompt.
    #[arg(long, default_value = "64", value_parser = at_least_one())]
    holders: u64,
}

#[derive(Debug, Args)]
pub(super) struct Run {
    #[command(flatten)]
    sizes: Prompts,
    /// The server, without TLS or tokens: http://HOST:PORT. It is filled with workers and blocks that do not exist.
    /// [default: http://[::1]:50051] [env: KV_INDEXER_ENDPOINT]
    #[arg(long, short, value_name = "URL")]
    server: Option<String>,
    /// Allows a server that is not on this machine.
    #[arg(long)]
    anywhere: bool,
    /// Seconds that calls are sent and counted.
    #[arg(long, default_value = "5", value_parser = seconds)]
    seconds: Duration,
    /// Seconds of the same before that.
    #[arg(long, default_value = "1", value_parser = seconds)]
    warm_up: Duration,
    /// Calls a second, at fixed times; 0 sends as fast as answers come.
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(u64).range(..=10_000_000))]
    rate: u64,
    /// Connections.
    #[arg(long, default_value = "2", value_parser = clap::value_parser!(u64).range(1..=1024))]
    connections: u64,
    /// Calls in flight without a rate, over all connections.
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    in_flight: u64,
    /// Different prompts.
    #[arg(long, default_value = "64", value_parser = at_least_one())]
    prompts: u64,
    /// Blocks of a long query.
    #[arg(long, default_value = "1000000", value_parser = at_least_one())]
    long_blocks: u64,
    /// grpc-timeout of a call in milliseconds; 0 for none.
    #[arg(long, default_value = "0")]
    timeout_ms: u64,
    /// Also tells what processor time this process takes per call.
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// The server already holds the prompts of an earlier run with the same sizes.
    #[arg(long)]
    prepared: bool,
}

#[derive(Debug, Args)]
pub(super) struct Noop {
    #[command(flatten)]
    sizes: Prompts,
    /// Address and port.
    #[arg(long, default_value = "[::1]:50052")]
    listen: SocketAddr,
}

#[derive(Debug, Args)]
pub(super) struct Flood {
    /// Address and port that the bridge connects to.
    #[arg(long, default_value = "127.0.0.1:5557")]
    listen: SocketAddr,
    /// Seconds that it lasts, from the bridge's coming on.
    #[arg(long, default_value = "10", value_parser = seconds)]
    seconds: Duration,
}

/// A size within a prompt that a message can carry.
fn at_least_one() -> clap::builder::RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(1..=crate::client::HASHES_PER_QUERY_MAX as u64)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "seconds from 0 to 86400".to_owned())
}

/// A number that the command line has bounded.
fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Bench {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        match self {
            Bench::Query(run) => run.run(Mode::Query, environment).await,
            Bench::Fill(run) => run.run(Mode::Fill, environment).await,
            Bench::Mixed(run) => run.run(Mode::Mixed, environment).await,
            Bench::LongScan(run) => run.run(Mode::LongScan, environment).await,
            Bench::Noop(Noop { sizes, listen }) => {
                let answer = plan::answer(size(sizes.blocks), size(sizes.holders));
                let listener = self::listen(listen, environment).await?;
                tokio::select! {
                    biased;
                    () = &mut environment.shutdown => {}
                    served = noop::serve(listener, answer) => {
                        served.map_err(|error| Failure::Input(format!("{listen}: {error}")))?;
                    }
                }
                Ok(Outcome::Done)
            }
            Bench::Flood(Flood { listen, seconds }) => {
                let listener = self::listen(listen, environment).await?;
                flood::run(listener, seconds, environment).await
            }
        }
    }
}

/// Binds an address and says which port that became.
async fn listen(address: SocketAddr, environment: &mut Environment<'_>) -> Result<TcpListener, Failure> {
    let failed = |error| Failure::Input(format!("{address}: {error}"));
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    writeln!(environment.out, "listening on {}", listener.local_addr().map_err(failed)?)?;
    environment.out.flush()?;
    Ok(listener)
}

impl Run {
    async fn run(self, mode: Mode, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let server = match &self.server {
            Some(server) => server.clone(),
            None => remote::endpoints_default(environment)?[0].clone(),
        };
        if !self.anywhere && !is_here(&server)? {
            return Err(Failure::Input(format!("{server} is not on this machine; --anywhere allows that")));
        }
        let sizes = Sizes {
            prompts: size(self.prompts),
            blocks: size(self.sizes.blocks),
            holders: size(self.sizes.holders),
            long_blocks: size(self.long_blocks),
        };
        let plan = Plan::new(mode, sizes);
        let timeout = Duration::from_millis(self.timeout_ms);
        let load = Arc::new(Load::connect(&server, size(self.connections), plan, timeout).await?);
        if !self.prepared {
            let progress = output::progress(load.plan.preparation_calls() as u64, "reported");
            for body in load.plan.preparation() {
                let sent = load.send(0, &Call { kind: Kind::Apply, body }).await;
                sent.map_err(|status| failed(&status))?;
                progress.inc(1);
            }
        }
        let mut answers = 0;
        for (phase, time) in [("warms up", self.warm_up), ("measures", self.seconds)] {
            let spinner = output::spinner("");
            spinner.set_message(phase);
            spinner.tick();
            load.tallies.lock().clear();
            let before = self.server_pid.map(processor_time).unwrap_or_default();
            let start = Instant::now();
            match self.rate {
                0 => load::closed(&load, size(self.in_flight), time).await,
                // As a task: outside of one it would take a thread of its own, and the processor from the tasks.
                rate => {
                    let sent = tokio::spawn(load::open(Arc::clone(&load), rate as f64, time));
                    sent.await.map_err(|error| Failure::Output(std::io::Error::other(error)))?;
                }
            }
            drop(spinner);
            if phase == "measures" {
                let after = self.server_pid.map(processor_time).unwrap_or_default();
                answers =
                    print(&load.tallies.lock(), start.elapsed(), after.saturating_sub(before), environment)?;
            }
        }
        Ok(Outcome::found(answers > 0))
    }
}

/// Whether every address of a server's host is this machine's own.
fn is_here(server: &str) -> Result<bool, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Input(format!("{server:?}: {error}"));
    if server.starts_with("unix:") {
        return Ok(true);
    }
    let uri: Uri = server.parse().map_err(|error: http::uri::InvalidUri| failed(&error))?;
    let host = uri.host().ok_or_else(|| failed(&"no host"))?.trim_matches(['[', ']']);
    let mut addresses =
        (host, uri.port_u16().unwrap_or(80)).to_socket_addrs().map_err(|error| failed(&error))?;
    Ok(addresses.all(|address| address.ip().is_loopback()))
}

/// Time that all processors spent on a process, in ticks of 10 ms; none of one that is not there.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The second field is a name in brackets; user and system time are 12 and 13 fields after it.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(10 * ticks)
}

/// Writes a row per kind of call, and the server's time; returns how many answers there were.
fn print(
    tallies: &Tallies,
    elapsed: Duration,
    server: Duration,
    environment: &mut Environment<'_>,
) -> Result<u64, Failure> {
    let out = &mut environment.out;
    writeln!(out, "kind\tper second\tp50 us\tp90 us\tp99 us\tp99.9 us\tmax us\terrors")?;
    for (kind, name) in Kind::ALL {
        let Some((_, tally)) = tallies.iter().find(|(known, _)| *known == kind) else { continue };
        let latency = &tally.latency;
        write!(out, "{name}\t{:.0}", latency.len() as f64 / elapsed.as_secs_f64())?;
        for quantile in [0.5, 0.9, 0.99, 0.999, 1.0] {
            write!(out, "\t{:.0}", latency.value_at_quantile(quantile) as f64 / 1e3)?;
        }
        let errors: Vec<String> =
            tally.errors.iter().map(|(error, count)| format!("{count} {}", output::plain(error))).collect();
        writeln!(out, "\t{}", if errors.is_empty() { "-".to_owned() } else { errors.join(", ") })?;
    }
    let answers: u64 = tallies.iter().map(|(_, tally)| tally.latency.len()).sum();
    if !server.is_zero() && answers > 0 {
        let each = server.as_secs_f64() * 1e6 / answers as f64;
        writeln!(out, "server\t{each:.2} us of processor time per call")?;
    }
    Ok(answers)
}
