//! When calls are sent, and what came of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdrhistogram::Histogram;
use http::uri::PathAndQuery;
use parking_lot::Mutex;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::plan::{self, Call, Kind, Plan};
use crate::cli::Failure;
use crate::client::{self, Credentials, Raw};

/// Calls of an open loop that may wait for answers at once; more are counted as not sent.
const OUTSTANDING_MAX: usize = 1_000;

/// Latencies above this count as this.
const LATENCY_MAX: Duration = Duration::from_secs(60);

/// What the runtime's timer is good for.
const TIMER: Duration = Duration::from_millis(1);

/// How long answers are waited for after the last call of an open loop.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// Answers by kind, and what went wrong.
#[derive(Debug)]
pub(super) struct Tally {
    /// In nanoseconds.
    pub(super) latency: Histogram<u64>,
    pub(super) errors: BTreeMap<String, u64>,
}

/// A tally for each kind that was sent.
pub(super) type Tallies = Vec<(Kind, Tally)>;

/// Calls on their way to one server.
#[derive(Debug)]
pub(super) struct Load {
    channels: Vec<Channel>,
    pub(super) plan: Plan,
    timeout: Duration,
    pub(super) tallies: Mutex<Tallies>,
    outstanding: AtomicUsize,
}

impl Load {
    /// Connects so many times to a server; a `timeout` of zero is none.
    pub(super) async fn connect(
        server: &str,
        connections: usize,
        plan: Plan,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        let endpoint = client::endpoint(server, &Credentials::default())
            .map_err(|error| Failure::Input(error.to_string()))?;
        let mut channels = Vec::new();
        for _ in 0..connections {
            let channel = endpoint.connect().await;
            let failed = |error| {
                let status = Status::from_error(Box::new(error));
                Failure::NoAnswer(format!("{server}: {}", client::reason(&status)))
            };
            channels.push(channel.map_err(failed)?);
        }
        Ok(Load { channels, plan, timeout, tallies: Mutex::default(), outstanding: AtomicUsize::new(0) })
    }

    /// Sends call number `number`.
    pub(super) async fn send(&self, number: usize, call: &Call) -> Result<Bytes, Status> {
        let mut client = tonic::client::Grpc::new(self.channels[number % self.channels.len()].clone());
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = Request::new(call.body.clone());
        if !self.timeout.is_zero() {
            request.set_timeout(self.timeout);
        }
        let path = if call.kind == Kind::Apply { plan::APPLY } else { plan::PREFIX };
        let answer = client.unary(request, PathAndQuery::from_static(path), Raw).await?;
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

/// Keeps so many calls in flight for a time.
pub(super) async fn closed(load: &Arc<Load>, in_flight: usize, time: Duration) {
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

/// Sends so many calls a second for a time, whatever comes of them.
pub(super) async fn open(load: Arc<Load>, rate: f64, time: Duration) {
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
