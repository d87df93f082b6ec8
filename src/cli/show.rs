//! `show`: the events of a recording, readable.
//!
//! What is shown is what the bridge's decoder sees, a line per event, and why it would
//! skip what it cannot use.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::asking::tier_name;
use super::recording::{Entry, Recording, What};
use super::{Environment, Failure, Outcome, output};
use crate::bridge::event::{Batch, Change, Decoder, Event, FULL, MAMBA, SWA};

/// Hashes of an event that are shown unless all are wanted.
const HASHES_SHOWN: usize = 3;

#[derive(Debug, Args)]
pub(super) struct Show {
    /// A recording, or a capture in lines of JSON.
    file: PathBuf,
    /// Shows this stream alone.
    #[arg(long, value_name = "NAME")]
    stream: Option<String>,
    /// Shows every hash.
    #[arg(long)]
    hashes: bool,
    /// Writes a line of JSON per message, with every hash.
    #[arg(long)]
    json: bool,
}

impl Show {
    pub(super) fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let recording = Recording::open(&self.file)?;
        // Lines are the progress.
        recording.progress.finish_and_clear();
        let mut decoder = Decoder::default();
        let mut shown = false;
        for entry in recording {
            let entry = entry?;
            if self.stream.as_deref().is_some_and(|wanted| wanted != &*entry.stream) {
                continue;
            }
            shown = true;
            if self.json {
                output::json(environment.out, &as_json(&entry, &mut decoder))?;
            } else {
                self.text(&entry, &mut decoder, environment.out)?;
            }
        }
        Ok(Outcome::found(shown))
    }

    fn text(&self, entry: &Entry, decoder: &mut Decoder, out: &mut dyn Write) -> Result<(), Failure> {
        let (at, stream) = (entry.at.as_secs_f64(), output::plain(&entry.stream));
        let frames = match &entry.what {
            What::Connected => return Ok(writeln!(out, "{at:>12.6} {stream} connected")?),
            What::Disconnected => return Ok(writeln!(out, "{at:>12.6} {stream} disconnected")?),
            What::Message(frames) => frames,
        };
        let message = Message::of(frames);
        let sequence = message.sequence.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let payload = message.payload;
        writeln!(out, "{at:>12.6} {stream} #{sequence}, {} bytes", payload.len())?;
        let batch = match decoder.decode(payload) {
            Ok(batch) => batch,
            Err(error) => return Ok(writeln!(out, "{:>12} skipped: {error}", "")?),
        };
        for event in batch.events {
            writeln!(out, "{:>12} {}", "", self.line(&batch, event))?;
        }
        for note in notes(&batch) {
            writeln!(out, "{:>12} {note}", "")?;
        }
        Ok(())
    }

    fn line(&self, batch: &Batch<'_, '_>, event: &Event) -> String {
        let (what, tier, more) = match event.change {
            Change::Cleared => return "cleared".to_owned(),
            Change::Removed { tier } => ("removed", tier, String::new()),
            Change::Stored { tier, mask, block_tokens } => {
                ("stored", tier, format!(" of {block_tokens} tokens{}", components(mask)))
            }
        };
        let group = event.group.map_or_else(String::new, |group| format!(", group {group}"));
        let all = batch.hashes(event);
        let shown = if self.hashes { usize::MAX } else { HASHES_SHOWN };
        let mut hashes: Vec<String> = all.clone().take(shown).map(|hash| hash.to_string()).collect();
        if all.len() > shown {
            hashes.push("…".to_owned());
        }
        let count = event.hashes;
        format!("{what} {count} at {}{more}{group}: {}", tier_name(tier.into()), hashes.join(" "))
    }
}

/// A message's parts, as far as they are there.
struct Message<'a> {
    topic: Option<&'a [u8]>,
    sequence: Option<u64>,
    payload: &'a [u8],
}

impl<'a> Message<'a> {
    fn of(frames: &'a [bytes::Bytes]) -> Self {
        let (topic, sequence, payload) = match frames {
            [topic, sequence, payload] => (Some(&topic[..]), Some(sequence), Some(payload)),
            [sequence, payload] => (None, Some(sequence), Some(payload)),
            _ => (None, None, frames.last()),
        };
        let sequence = sequence.and_then(|frame| <[u8; 8]>::try_from(&frame[..]).ok());
        Message {
            topic,
            sequence: sequence.map(u64::from_be_bytes),
            payload: payload.map(|frame| &frame[..]).unwrap_or_default(),
        }
    }
}

fn components(mask: u32) -> String {
    let names = [(FULL, "full"), (SWA, "swa"), (MAMBA, "mamba")];
    let names: Vec<&str> = names.iter().filter(|(bit, _)| mask & bit != 0).map(|(_, name)| *name).collect();
    if names.is_empty() { String::new() } else { format!(" with {}", names.join(",")) }
}

/// What of a batch its events do not tell.
fn notes(batch: &Batch<'_, '_>) -> Vec<String> {
    let left = batch.left_out;
    let mut all = Vec::new();
    if let Some(error) = left.first_error {
        all.push(format!("{} events skipped, the first because {error}", left.undecodable));
    }
    for (count, what) in [
        (left.unknown_tags, "events skipped: of an unknown kind"),
        (left.unknown_media, "events skipped: at a medium that is no local tier"),
        (left.unknown_components, "components left out: of an unknown name"),
        (left.unknown_groups, "stores of a cache group that has no component"),
    ] {
        if count > 0 {
            all.push(format!("{count} {what}"));
        }
    }
    all
}

fn as_json(entry: &Entry, decoder: &mut Decoder) -> Value {
    let mut value = json!({"t": entry.at.as_secs_f64(), "stream": &*entry.stream});
    let frames = match &entry.what {
        What::Connected => {
            value["what"] = "connected".into();
            return value;
        }
        What::Disconnected => {
            value["what"] = "disconnected".into();
            return value;
        }
        What::Message(frames) => frames,
    };
    let message = Message::of(frames);
    value["what"] = "message".into();
    value["topic"] = message.topic.map(String::from_utf8_lossy).into();
    value["sequence"] = message.sequence.into();
    match decoder.decode(message.payload) {
        Ok(batch) => {
            value["rank"] = batch.rank.into();
            value["events"] = batch.events.iter().map(|event| event_json(&batch, event)).collect();
            value["notes"] = notes(&batch).into();
        }
        Err(error) => value["error"] = error.to_string().into(),
    }
    value
}

fn event_json(batch: &Batch<'_, '_>, event: &Event) -> Value {
    let blocks: Vec<Value> = batch.hashes(event).map(output::hash).collect();
    match event.change {
        Change::Cleared => json!({"event": "cleared"}),
        Change::Removed { tier } => {
            json!({"event": "removed", "tier": tier_name(tier.into()), "group": event.group, "blocks": blocks})
        }
        Change::Stored { tier, mask, block_tokens } => json!({
            "event": "stored",
            "tier": tier_name(tier.into()),
            "group": event.group,
            "components": mask,
            "tokens": block_tokens,
            "blocks": blocks,
        }),
    }
}
