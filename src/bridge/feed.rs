//! A server, the queue for it and the RPC under way to it.
//!
//! [`Feeds`] are the servers of one stream. Each is told the same changes in the same
//! order at its own pace: one that is slow, away or refuses holds back no other.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::config::Config;
use super::mirror::Mirror;
use super::replica::{Replica, Told, clears};
use super::sender::{Life, Refused, Sender, ServerError, Taken};
use super::status::{Reporter, ServerStatus};
use crate::pb::ExternalKvAction;

type Sending = Pin<Box<dyn Future<Output = Result<Taken, Refused>> + Send>>;

/// All servers of a stream, in the order of the settings.
pub(super) struct Feeds {
    feeds: Vec<Feed>,
    mirror: Mirror,
    /// After how long a server that there is nothing to tell is told nothing.
    idle: Option<Duration>,
    /// Whether the mirror holds what may be void: then servers are told only that nothing is known.
    withholds: bool,
}

struct Feed {
    server: String,
    sender: Sender,
    replica: Replica,
    in_flight: Option<Sending>,
    /// The life of the server that took the last RPC.
    life: Option<Life>,
    /// When the last RPC was made.
    told: Instant,
    /// Whether the server was told that nothing is known, while there was something withheld.
    cleared: bool,
    refused: Option<Refused>,
}

impl Feeds {
    pub(super) fn new(config: &Config, mirror: Mirror, reporter: &Reporter) -> Result<Self, ServerError> {
        let feed = |(place, server): (usize, &String)| {
            Ok(Feed {
                server: server.clone(),
                sender: Sender::new(config, place, reporter.clone())?,
                replica: Replica::new(),
                in_flight: None,
                life: None,
                told: Instant::now(),
                cleared: false,
                refused: None,
            })
        };
        let feeds = config.servers.iter().enumerate().map(feed).collect::<Result<_, _>>()?;
        Ok(Feeds { feeds, mirror, idle: config.idle_report, withholds: false })
    }

    /// Takes one RPC's changes for every server; how many blocks did not fit the mirror.
    /// Leaves in `actions` what did.
    pub(super) fn push(&mut self, actions: &mut Vec<ExternalKvAction>) -> usize {
        let left_out = self.mirror.apply(actions);
        if !actions.is_empty() {
            self.feeds.iter_mut().for_each(|feed| feed.replica.push(actions));
        }
        left_out
    }

    /// The mirror holds what is yet to be proved, of which servers are to be told nothing; before the first RPC.
    pub(super) fn withhold(&mut self) {
        self.withholds = true;
    }

    /// What was withheld is true.
    pub(super) fn release(&mut self) {
        self.withholds = false;
    }

    /// What was withheld is void.
    pub(super) fn drop_withheld(&mut self) {
        self.mirror.empty();
        self.withholds = false;
    }

    /// Starts an RPC to every server that has none under way and is to be told something.
    pub(super) fn start(&mut self) {
        for feed in self.feeds.iter_mut().filter(|feed| feed.in_flight.is_none() && feed.refused.is_none()) {
            let quiet = self.idle.is_some_and(|idle| feed.told.elapsed() >= idle);
            let told = if self.withholds {
                feed.next_while_withheld(quiet)
            } else {
                feed.replica.next(&self.mirror).or_else(|| quiet.then(Told::nothing))
            };
            if let Some(told) = told {
                feed.told = Instant::now();
                feed.in_flight = Some(Box::pin(feed.sender.send(told, feed.life.as_ref())));
            }
        }
    }

    /// Waits until a server has taken its RPC, or until one is to be given a sign of life.
    ///
    /// Cancelling it loses nothing.
    ///
    /// # Errors
    /// The last server that was left has refused a batch for good.
    pub(super) async fn advance(&mut self) -> Result<(), Refused> {
        let due = self.due();
        let sent = poll_fn(|context| self.poll(context));
        match due {
            Some(due) => tokio::select! {
                sent = sent => sent,
                () = tokio::time::sleep_until(due) => {
                    self.mirror.maintain();
                    Ok(())
                }
            },
            None => sent.await,
        }
    }

    /// When the first of the servers that are told nothing is to be given a sign of life.
    fn due(&self) -> Option<Instant> {
        let quiet = self.feeds.iter().filter(|feed| feed.in_flight.is_none() && feed.refused.is_none());
        Some(quiet.map(|feed| feed.told).min()? + self.idle?)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Refused>> {
        for place in 0..self.feeds.len() {
            let feed = &mut self.feeds[place];
            let Some(sending) = &mut feed.in_flight else { continue };
            let Poll::Ready(sent) = sending.as_mut().poll(context) else { continue };
            feed.in_flight = None;
            match sent {
                Ok(taken) => feed.taken(taken),
                Err(refused) => {
                    warn!(server = feed.server, "the server is told nothing any more: {refused}");
                    feed.refused = Some(refused);
                }
            }
            if self.feeds.iter().all(|feed| feed.refused.is_some())
                && let Some(refused) = self.feeds[place].refused.take()
            {
                return Poll::Ready(Err(refused));
            }
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    }

    /// Whether every server that still is told anything has been told all.
    pub(super) fn is_idle(&self) -> bool {
        let idle = |feed: &Feed| {
            feed.in_flight.is_none() && (feed.replica.is_idle() || (self.withholds && feed.cleared))
        };
        self.feeds.iter().all(|feed| feed.refused.is_some() || idle(feed))
    }

    /// Writes what there is to be known of each server.
    pub(super) fn report(&self, servers: &mut [ServerStatus]) {
        for (feed, status) in self.feeds.iter().zip(servers) {
            status.synchronised = feed.replica.is_live() && feed.life.is_some();
            status.synchronisations = feed.replica.synchronisations();
            status.pending_bytes = feed.replica.pending_bytes();
            status.refused = feed.refused.is_some();
        }
    }
}

impl Feed {
    /// As long as it is not known what is true, a server is told that the worker holds nothing, and that
    /// this is not all.
    fn next_while_withheld(&mut self, quiet: bool) -> Option<Told> {
        let actions = if std::mem::replace(&mut self.cleared, true) { Vec::new() } else { clears() };
        (quiet || !actions.is_empty()).then_some(Told { actions, synchronised: false })
    }

    /// Notes that the server took its RPC, and whether it still knows what it took before.
    fn taken(&mut self, taken: Taken) {
        if self.life.as_ref().is_some_and(|last| *last != taken.life || taken.is_new) {
            info!(
                server = self.server,
                "the server has begun anew, or forgot the worker: it is told everything"
            );
            self.replica.fall_behind();
        }
        self.life = Some(taken.life);
    }
}
