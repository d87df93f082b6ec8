//! A load generator for any server of the contract or for a bridge, and a server that does nothing.
//!
//! Closed loop: each of so many clients sends its next call when it has the
//! answer to the last. Open loop (`--rate`): calls leave at fixed times whatever
//! the server does, and latency counts from the time a call should have left, so
//! that a stall shows in every call that it delayed. Both end after a fixed time.

mod noop;
mod plan;
mod publish;
mod raw;
#[path = "../../benches/workload/mod.rs"]
mod workload;

use std::collections::BTreeMap;
use std::error::Error;
use std::net::ToSocketAddrs;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Arg, ArgAction, ArgMatches, Command};
use hdrhistogram::Histogram;
use http::Uri;
use http::uri::PathAndQuery;
use parking_lot::Mutex;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use plan::{Call, Kind, Mode, Plan, Sizes};
use raw::RawCodec;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Calls of an open loop that may wait for answers at once; more are counted as not sent.
const OUTSTANDING_MAX: usize = 1_000;

/// Latencies above this count as this.
const LATENCY_MAX: Duration = Duration::from_secs(60);

/// What the runtime's timer is good for.
const TIMER: Duration = Duration::from_millis(1);

/// How long answers are waited for after the last call of an open loop.
const DRAIN_MAX: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = command().get_matches();
    let threads = number(&arguments, "threads");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    match arguments.subcommand() {
        Some(("noop", arguments)) => {
            let answer = plan::answer(number(arguments, "blocks"), number(arguments, "holders"));
            let address = text(arguments, "listen").parse()?;
            Ok(runtime.block_on(noop::serve(address, answer))?)
        }
        Some(("publish", arguments)) => {
            let seconds = Duration::from_secs_f64(number(arguments, "seconds"));
            runtime.block_on(publish::flood(text(arguments, "listen"), seconds))
        }
        Some((mode, arguments)) => {
            let mode = match mode {
                "query" => Mode::Query,
                "fill" => Mode::Fill,
                "mixed" => Mode::Mixed,
                _ => Mode::LongScan,
            };
            runtime.block_on(run(mode, arguments))
        }
        None => unreachable!("a subcommand is required"),
    }
}

fn command() -> Command {
    let value = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("VALUE").default_value(default).help(help)
    };
    let sizes = [
        value("blocks", "2000", "blocks of a prompt"),
        value("holders", "64", "workers that hold each prompt"),
    ];
    let load = |name: &'static str, about: &'static str| {
        Command::new(name).about(about).args(sizes.clone()).args([
            value("target", "http://[::1]:50051", "the server"),
            value("seconds", "5", "how long calls are sent and counted"),
            value("warm-up", "1", "seconds before that"),
            value("rate", "0", "calls a second, at fixed times; 0 sends as fast as answers come"),
            value("connections", "2", "connections"),
            value("in-flight", "16", "calls in flight without a rate, over all connections"),
            value("prompts", "64", "different prompts"),
            value("long-blocks", "1000000", "blocks of a long query"),
            value("timeout-ms", "0", "grpc-timeout of a call; 0 for none"),
            value("server-pid", "0", "also tells what processor time this process takes per call"),
            Arg::new("prepared")
                .long("prepared")
                .action(ArgAction::SetTrue)
                .help("the server already holds the prompts of an earlier run with the same sizes"),
            Arg::new("anywhere")
                .long("anywhere")
                .action(ArgAction::SetTrue)
                .help("allows a target that is not on this machine"),
        ])
    };
    Command::new("load")
        .about("Loads a server of the contract or a bridge, or stands in for a server.")
        .subcommand_required(true)
        .arg(value("threads", "2", "threads of the runtime"))
        .subcommands([
            load("query", "prefix queries"),
            load("fill", "reports of 32 new blocks"),
            load("mixed", "nine queries to one apply of 32 blocks"),
            load("long-scan", "the same, and one call of a hundred is a long query"),
            Command::new("noop")
                .about("serves answers of the right size and does nothing")
                .args(sizes.clone())
                .arg(value("listen", "[::1]:50052", "address and port")),
            Command::new("publish")
                .about("floods one bridge with an engine's events, as fast as it reads them")
                .arg(value("listen", "127.0.0.1:5557", "address and port"))
                .arg(value("seconds", "10", "for how long")),
        ])
}

fn text<'a>(arguments: &'a ArgMatches, name: &str) -> &'a str {
    arguments.get_one::<String>(name).expect("has a default")
}

fn number<T: FromStr>(arguments: &ArgMatches, name: &str) -> T {
    text(arguments, name).parse().unwrap_or_else(|_| {
        eprintln!("--{name}: not a number: {}", text(arguments, name));
        std::process::exit(2);
    })
}

async fn run(mode: Mode, arguments: &ArgMatches) -> Result<(), Box<dyn Error>> {
    let target = text(arguments, "target");
    if !arguments.get_flag("anywhere") && !is_here(target)? {
        return Err(format!("{target} is not on this machine; --anywhere allows that").into());
    }
    let sizes = Sizes {
        prompts: number(arguments, "prompts"),
        blocks: number(arguments, "blocks"),
        holders: number(arguments, "holders"),
        long_blocks: number(arguments, "long-blocks"),
    };
    let plan = Plan::new(mode, sizes);
    let load = Arc::new(Load {
        channels: connect(target, number(arguments, "connections")).await?,
        plan,
        timeout: Duration::from_millis(number(arguments, "timeout-ms")),
        tallies: Default::default(),
        outstanding: AtomicUsize::new(0),
    });
    if !arguments.get_flag("prepared") {
        for body in load.plan.preparation() {
            load.send(0, &Call { kind: Kind::Apply, body }).await?;
        }
    }
    let rate: f64 = number(arguments, "rate");
    let in_flight: usize = number(arguments, "in-flight");
    let pid: u32 = number(arguments, "server-pid");
    for (name, phase) in [("warm-up", false), ("seconds", true)] {
        let seconds = Duration::from_secs_f64(number(arguments, name));
        load.tallies.lock().clear();
        let before = processor_time(pid);
        let start = Instant::now();
        if rate > 0.0 {
            // As a task: outside of one it would take a thread of its own, and the processor from the tasks.
            tokio::spawn(open(Arc::clone(&load), rate, seconds)).await?;
        } else {
            closed(&load, in_flight, seconds).await;
        }
        if phase {
            print(&load.tallies.lock(), start.elapsed(), processor_time(pid).saturating_sub(before));
        }
    }
    Ok(())
}

fn is_here(target: &str) -> Result<bool, Box<dyn Error>> {
    let uri: Uri = target.parse()?;
    let host = uri.host().ok_or("the target has no host")?.trim_matches(['[', ']']);
    let mut addresses = (host, uri.port_u16().unwrap_or(80)).to_socket_addrs()?;
    Ok(addresses.all(|address| address.ip().is_loopback()))
}

async fn connect(target: &str, connections: usize) -> Result<Vec<Channel>, Box<dyn Error>> {
    let mut channels = Vec::new();
    for _ in 0..connections {
        let endpoint = Endpoint::from_shared(target.to_owned())?.tcp_nodelay(true);
        channels.push(endpoint.connect().await?);
    }
    Ok(channels)
}

/// Answers by kind, and what went wrong.
#[derive(Debug)]
struct Tally {
    /// In nanoseconds.
    latency: Histogram<u64>,
    errors: BTreeMap<String, u64>,
}

type Tallies = Vec<(Kind, Tally)>;

#[derive(Debug)]
struct Load {
    channels: Vec<Channel>,
    plan: Plan,
    timeout: Duration,
    tallies: Mutex<Tallies>,
    outstanding: AtomicUsize,
}

impl Load {
    async fn send(&self, number: usize, call: &Call) -> Result<Bytes, Status> {
        let mut client = tonic::client::Grpc::new(self.channels[number % self.channels.len()].clone());
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = Request::new(call.body.clone());
        if !self.timeout.is_zero() {
            request.set_timeout(self.timeout);
        }
        let path = if call.kind == Kind::Apply { plan::APPLY } else { plan::PREFIX };
        let answer = client.unary(request, PathAndQuery::from_static(path), RawCodec).await?;
        Ok(answer.into_inner())
    }

    /// Sends call number `number` and counts its latency from `start`.
    async fn measure(&self, number: usize, start: Instant) {
        let call = self.plan.call(number);
        let outcome = match self.send(number, &call).await {
            Ok(answer) if self.plan.is_right(call.kind, &answer) => Ok(()),
            Ok(_) => Err("WRONG ANSWER".to_owned()),
            Err(status) if status.code() == Code::Unknown => Err(format!("Unknown: {}", status.message())),
            Err(status) => Err(format!("{:?}", status.code())),
        };
        self.count(call.kind, outcome.map(|()| start.elapsed()));
    }

    fn count(&self, kind: Kind, outcome: Result<Duration, String>) {
        let mut tallies = self.tallies.lock();
        let place = tallies.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            let latency = Histogram::new_with_max(LATENCY_MAX.as_nanos() as u64, 3).expect("good bounds");
            tallies.push((kind, Tally { latency, errors: BTreeMap::new() }));
            tallies.len() - 1
        });
        let tally = &mut tallies[place].1;
        match outcome {
            Ok(latency) => tally.latency.saturating_record(latency.as_nanos() as u64),
            Err(error) => *tally.errors.entry(error).or_default() += 1,
        }
    }
}

async fn closed(load: &Arc<Load>, in_flight: usize, time: Duration) {
    let end = Instant::now() + time;
    let numbers = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..in_flight)
        .map(|_| {
            let (load, numbers) = (Arc::clone(load), Arc::clone(&numbers));
            tokio::spawn(async move {
                while Instant::now() < end {
                    // Relaxed: only the number matters.
                    load.measure(numbers.fetch_add(1, Ordering::Relaxed), Instant::now()).await;
                }
            })
        })
        .collect();
    for client in clients {
        client.await.expect("a client ends by itself");
    }
}

async fn open(load: Arc<Load>, rate: f64, time: Duration) {
    let start = Instant::now();
    let calls = (time.as_secs_f64() * rate) as usize;
    let mut due = start;
    let mut number = 0;
    while number < calls {
        wait_until(due).await;
        // All that are due by now at once, so that being late costs no more than it must.
        let now = Instant::now();
        while number < calls && due <= now {
            spawn(&load, number, due);
            number += 1;
            due = start + Duration::from_secs_f64(number as f64 / rate);
        }
    }
    let end = Instant::now() + DRAIN_MAX;
    // Acquire pairs with the calls' release, so that what they counted is seen.
    while load.outstanding.load(Ordering::Acquire) > 0 && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Sends a call of an open loop, unless too many wait for answers.
fn spawn(load: &Arc<Load>, number: usize, due: Instant) {
    if load.outstanding.load(Ordering::Relaxed) >= OUTSTANDING_MAX {
        load.count(load.plan.call(number).kind, Err("not sent".to_owned()));
        return;
    }
    load.outstanding.fetch_add(1, Ordering::Relaxed);
    let load = Arc::clone(load);
    tokio::spawn(async move {
        load.measure(number, due).await;
        load.outstanding.fetch_sub(1, Ordering::Release);
    });
}

/// Lets other tasks run until then. The runtime's timer is no finer than a
/// millisecond, so what is left after it is spent going around: an open loop
/// wants a processor of its own.
async fn wait_until(due: Instant) {
    let left = due.saturating_duration_since(Instant::now());
    if left > 2 * TIMER {
        tokio::time::sleep(left - 2 * TIMER).await;
    }
    // Once even if it is late: others have to run to catch up.
    loop {
        tokio::task::yield_now().await;
        if Instant::now() >= due {
            return;
        }
    }
}

/// Time that all processors spent on a process, in ticks of 10 ms; none of process 0.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The second field is a name in brackets; user and system time are 12 and 13 fields after it.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(10 * ticks)
}

fn print(tallies: &Tallies, elapsed: Duration, server: Duration) {
    println!("kind\tper second\tp50 us\tp90 us\tp99 us\tp99.9 us\tmax us\terrors");
    for (kind, name) in Kind::ALL {
        let Some((_, tally)) = tallies.iter().find(|(known, _)| *known == kind) else { continue };
        let latency = &tally.latency;
        print!("{name}\t{:.0}", latency.len() as f64 / elapsed.as_secs_f64());
        for quantile in [0.5, 0.9, 0.99, 0.999, 1.0] {
            print!("\t{:.0}", latency.value_at_quantile(quantile) as f64 / 1e3);
        }
        let errors: Vec<String> =
            tally.errors.iter().map(|(error, count)| format!("{count} {error}")).collect();
        println!("\t{}", if errors.is_empty() { "-".to_owned() } else { errors.join(", ") });
    }
    let answers: u64 = tallies.iter().map(|(_, tally)| tally.latency.len()).sum();
    if !server.is_zero() && answers > 0 {
        println!("server\t{:.2} us of processor time per call", server.as_secs_f64() * 1e6 / answers as f64);
    }
}
