//! Reads the recorded streams of `tests/data`; its README says what they hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use bytes::Bytes;
use flate2::read::GzDecoder;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// One recorded message.
#[derive(Debug, Clone)]
pub struct Message {
    pub stream: String,
    pub via: String,
    pub frames: Vec<Bytes>,
    /// What `synth-malformed` says of it.
    pub label: String,
}

/// A recording and what should come of it.
#[derive(Debug)]
pub struct Capture {
    pub name: String,
    pub topic: String,
    /// What the recording says of itself.
    pub header: Value,
    pub messages: Vec<Message>,
    pub expected: Value,
}

/// Every capture in `tests/data`.
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(data())
        .expect("tests/data")
        .filter_map(|entry| {
            let name = entry.expect("entry").file_name().into_string().expect("UTF-8");
            name.strip_suffix(".jsonl.gz").map(str::to_owned)
        })
        .collect();
    names.sort();
    names
}

fn data() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn unzip(name: &str) -> String {
    let mut text = String::new();
    let file = File::open(data().join(name)).expect(name);
    GzDecoder::new(file).read_to_string(&mut text).expect(name);
    text
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

/// Bytes of a text in hex.
pub fn unhex(text: &str) -> Bytes {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
    (0..text.len()).step_by(2).map(digit).collect()
}

impl Capture {
    pub fn read(name: &str) -> Self {
        let lines = unzip(&format!("{name}.jsonl.gz"));
        let mut lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let header = lines.next().expect("header");
        let messages = lines
            .map(|line| Message {
                stream: text(&line, "stream"),
                via: text(&line, "via"),
                frames: line["frames"]
                    .as_array()
                    .expect("frames")
                    .iter()
                    .map(|frame| unhex(frame.as_str().expect("hex")))
                    .collect(),
                label: text(&line, "label"),
            })
            .collect();
        let expected = serde_json::from_str(&unzip(&format!("{name}.expected.json.gz"))).expect("JSON");
        Capture { name: name.to_owned(), topic: text(&header, "topic"), header, messages, expected }
    }

    /// Streams that a subscriber received, with their expectations.
    pub fn streams(&self) -> Vec<(String, Value)> {
        let streams = self.expected["streams"].as_object().expect("streams");
        streams.iter().map(|(name, expected)| (name.clone(), expected.clone())).collect()
    }

    /// What a subscriber of `stream` received; for a replay, what it was answered.
    pub fn received(&self, stream: &str) -> impl Iterator<Item = &Message> {
        self.messages.iter().filter(move |message| message.stream == stream && message.via == "sub")
    }

    /// Payloads of everything recorded.
    pub fn payloads(&self) -> impl Iterator<Item = &Bytes> {
        self.messages.iter().filter_map(|message| message.frames.last())
    }
}

/// Media and, where there are groups, groups, to the blocks held there.
pub type State = BTreeMap<String, BTreeSet<String>>;

/// A recorded final state.
pub fn state_of(expected: &Value) -> State {
    let state = expected["final_state"].as_object().expect("final_state");
    let hashes = |list: &Value| {
        list.as_array().expect("list").iter().map(|hash| hash.as_str().expect("text").to_owned()).collect()
    };
    state.iter().map(|(tier, list)| (tier.clone(), hashes(list))).collect()
}

/// Digest of a state as the recordings have it.
pub fn digest(state: &State) -> String {
    let mut sha = Sha256::new();
    for (tier, hashes) in state {
        for hash in hashes {
            sha.update(format!("{tier} {hash}\n"));
        }
    }
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
