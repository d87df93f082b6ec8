//! A recorded stream as the changes that a bridge would report.
//!
//! The bridge's own parts do all of it, under the bridge's own settings, so that a
//! replay or a comparison means what a bridge means.

use std::sync::Arc;

use clap::Args;

use super::Failure;
use super::recording::What;
use crate::bridge::chunker::Chunker;
use crate::bridge::config::{Config, TABLE};
use crate::bridge::health::Health;
use crate::bridge::stream::{Rules, Stream};
use crate::pb::{ApplyExternalKvBatchRequest, TierType};
use crate::settings::Settings;

#[derive(Debug, Args)]
pub(super) struct FeedArguments {
    /// Which of a capture's streams to take; one alone may be left out.
    #[arg(long, value_name = "NAME")]
    pub(super) stream: Option<String>,
    /// The worker's name in the index. [default: the stream's name]
    #[arg(long, value_name = "NAME")]
    worker: Option<String>,
    /// URL under which routers reach the worker; without it the worker is not offered to routers.
    #[arg(long, value_name = "URL", default_value = "")]
    address: String,
    /// A setting of the bridge by its variable, e.g. KV_INDEXER_COPIES=set; may be given more than once.
    #[arg(long = "setting", value_name = "NAME=VALUE")]
    settings: Vec<String>,
}

impl FeedArguments {
    /// What a bridge of `stream` would be told.
    fn config(&self, stream: &str) -> Result<Config, Failure> {
        let find = |name: &str| TABLE.iter().find(|setting| setting.name == name);
        let mut values = Vec::new();
        for (name, value) in [
            ("KV_INDEXER_WORKER_ID", self.worker.as_deref().unwrap_or(stream)),
            ("KV_INDEXER_WORKER_ADDRESS", &self.address),
        ] {
            values.extend(find(name).map(|setting| (setting, value.to_owned())));
        }
        for text in &self.settings {
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            let Some(setting) = find(name) else {
                return Err(Failure::Input(format!("{name:?} is no setting of the bridge")));
            };
            values.push((setting, value.to_owned()));
        }
        let settings = Settings::default().overlaid(values);
        Config::read(&settings).map_err(|error| Failure::Input(error.to_string()))
    }
}

/// One stream on its way into an index.
pub(super) struct Feed {
    config: Config,
    stream: Stream,
    changes: Chunker,
    sent: u64,
}

impl Feed {
    fn new(config: Config) -> Self {
        let stream = Stream::new(Rules {
            worker_id: config.worker_id.clone(),
            topic: config.source.topic.clone(),
            clear_tiers: config.clear_tiers.clone(),
            replays: false,
            copies: config.copies,
            components: config.cache_spec.is_some(),
            rank: config.rank,
        });
        // A server that a bridge is new to is told first that nothing is held.
        let mut changes = Chunker::default();
        changes.clear(&[TierType::TierHbm, TierType::TierDram, TierType::TierSsd]);
        Feed { config, stream, changes, sent: 0 }
    }

    /// The worker's name.
    pub(super) fn worker(&self) -> &str {
        &self.config.worker_id
    }

    /// What the stream has been through.
    pub(super) fn health(&self) -> &Health {
        self.stream.health()
    }

    /// Takes what happened to the stream.
    pub(super) fn take(&mut self, what: &What) {
        match what {
            What::Connected => self.stream.connected(),
            What::Disconnected => self.stream.disconnected(),
            What::Message(frames) => self.stream.message(frames, &mut self.changes),
        }
    }

    /// Bytes of changes that wait.
    pub(super) fn waiting(&self) -> usize {
        self.changes.bytes()
    }

    /// The next report, `None` if nothing waits.
    pub(super) fn report(&mut self) -> Option<ApplyExternalKvBatchRequest> {
        let actions = self.changes.pop()?;
        self.sent += 1;
        Some(ApplyExternalKvBatchRequest {
            worker_id: self.config.worker_id.clone(),
            seq: self.sent,
            actions,
            worker_address: self.config.worker_address.clone(),
            cache_spec: self.config.cache_spec,
        })
    }
}

/// The streams of a recording that are taken, each a worker.
pub(super) struct Feeds {
    arguments: FeedArguments,
    feeds: Vec<(Arc<str>, Feed)>,
}

impl Feeds {
    /// No stream has been met yet; what is wrong with the arguments by themselves is told now.
    pub(super) fn new(arguments: FeedArguments) -> Result<Self, Failure> {
        arguments.config("any")?;
        Ok(Feeds { arguments, feeds: Vec::new() })
    }

    /// The feed of a stream; `None` if it is not taken.
    pub(super) fn of(&mut self, stream: &Arc<str>) -> Result<Option<&mut Feed>, Failure> {
        if self.arguments.stream.as_deref().is_some_and(|wanted| wanted != &**stream) {
            return Ok(None);
        }
        let place = match self.feeds.iter().position(|(known, _)| known == stream) {
            Some(place) => place,
            None => {
                if self.arguments.worker.is_some() && !self.feeds.is_empty() {
                    return Err(Failure::Input(format!(
                        "the recording has streams {:?} and {stream:?}: --stream picks one for --worker",
                        self.feeds[0].0
                    )));
                }
                self.feeds.push((Arc::clone(stream), Feed::new(self.arguments.config(stream)?)));
                self.feeds.len() - 1
            }
        };
        Ok(Some(&mut self.feeds[place].1))
    }

    /// All feeds, in the order their streams were met.
    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Feed> {
        self.feeds.iter_mut().map(|(_, feed)| feed)
    }

    /// Whether no message was of a stream that is taken.
    pub(super) fn is_empty(&self) -> bool {
        self.feeds.is_empty()
    }
}
