//! Many streams from one file: TOML or JSON, a list `streams` of tables.
//!
//! A stream's keys stand for the settings of a single stream and lie over them, so that
//! every rule about a value stays in [`config`]. `ranks`, a number or a list,
//! makes one stream for each data-parallel rank by the engines' rule: event and replay
//! port are the base port and the rank, and `-dpRANK` is added to the id, as each rank
//! has a cache of its own.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::{Map, Value};

use super::config::{self, Config};
use crate::settings::{Setting, SettingError, Settings};

/// Most streams of a file.
pub const STREAMS_MAX: usize = 4_096;

/// A file of streams that cannot be used.
#[derive(Debug)]
pub enum StreamsError {
    /// A setting, of the process or of a stream that is named.
    Setting(String, SettingError),
    /// The file, with what is wrong.
    File(String, String),
}

impl fmt::Display for StreamsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamsError::Setting(place, error) => write!(f, "{place}{error}"),
            StreamsError::File(path, what) => write!(f, "{path}: {what}"),
        }
    }
}

impl std::error::Error for StreamsError {}

/// The streams that the settings ask for: those of the file, or the single one.
///
/// # Errors
/// The first thing that cannot be used.
pub fn read(settings: &Settings) -> Result<Vec<Config>, StreamsError> {
    let Some(path) = config::streams_file(settings) else {
        let config = Config::read(settings).map_err(|error| StreamsError::Setting(String::new(), error))?;
        return Ok(vec![config]);
    };
    let wrong = |what: String| StreamsError::File(path.to_owned(), what);
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let file = if path.ends_with(".json") {
        serde_json::from_str::<Value>(&text).map_err(|error| wrong(error.to_string()))?
    } else {
        toml::from_str::<Value>(&text).map_err(|error| wrong(error.to_string()))?
    };
    parse(settings, path, &file)
}

fn parse(settings: &Settings, path: &str, file: &Value) -> Result<Vec<Config>, StreamsError> {
    let wrong = |what: &str| StreamsError::File(path.to_owned(), what.to_owned());
    let list = file.get("streams").and_then(Value::as_array).ok_or_else(|| wrong("no list of streams"))?;
    let mut configs = Vec::new();
    for (index, stream) in list.iter().enumerate() {
        let place = format!("{path}: stream {index}");
        let wrong = |what: String| StreamsError::File(place.clone(), what);
        let table = stream.as_object().ok_or_else(|| wrong("it is no table".to_owned()))?;
        let base = settings.overlaid(values(table).map_err(wrong)?);
        let config =
            Config::read(&base).map_err(|error| StreamsError::Setting(format!("{place}: "), error))?;
        match table.get("ranks") {
            None => configs.push(config),
            Some(ranks) => {
                let ranks = ranks_of(ranks).ok_or_else(|| wrong("ranks is no number or list".to_owned()))?;
                for rank in ranks {
                    configs.push(of_rank(&config, rank).ok_or_else(|| {
                        wrong(format!("rank {rank} has no port: an endpoint with a port of at most 65535"))
                    })?);
                }
            }
        }
        if configs.len() > STREAMS_MAX {
            return Err(wrong(format!("more than {STREAMS_MAX} streams")));
        }
    }
    let mut ids = BTreeSet::new();
    match configs.iter().find(|config| !ids.insert(config.worker_id.as_str())) {
        // Two streams of one worker would clear each other's blocks.
        Some(twice) => Err(wrong(&format!("the id {} is there twice", twice.worker_id))),
        None if configs.is_empty() => Err(wrong("no stream")),
        None => Ok(configs),
    }
}

/// A table's settings, as the texts that variables would have.
fn values(table: &Map<String, Value>) -> Result<Vec<(&'static Setting, String)>, String> {
    let mut values = Vec::new();
    for (key, value) in table.iter().filter(|(key, _)| *key != "ranks") {
        let Some(setting) = config::stream_setting(key) else {
            return Err(format!("the key {key} is unknown"));
        };
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Bool(value) => value.to_string(),
            Value::Number(value) => value.to_string(),
            Value::Array(list) => {
                let texts: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
                texts.ok_or_else(|| format!("{key} is no list of texts"))?.join(",")
            }
            Value::Null | Value::Object(_) => return Err(format!("{key} is no value")),
        };
        values.push((setting, text));
    }
    Ok(values)
}

fn ranks_of(value: &Value) -> Option<Vec<u16>> {
    if let Some(count) = value.as_u64() {
        return Some((0..u16::try_from(count).ok()?).collect());
    }
    value.as_array()?.iter().map(|rank| u16::try_from(rank.as_u64()?).ok()).collect()
}

fn of_rank(config: &Config, rank: u16) -> Option<Config> {
    let mut config = config.clone();
    config.worker_id = format!("{}-dp{rank}", config.worker_id);
    config.rank = Some(i64::from(rank));
    config.source.endpoint = at_rank(&config.source.endpoint, rank)?;
    if let Some(replay) = &config.source.replay {
        config.source.replay = Some(at_rank(replay, rank)?);
    }
    Some(config)
}

fn at_rank(endpoint: &str, rank: u16) -> Option<String> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    Some(format!("tcp://{host}:{}", port.parse::<u16>().ok()?.checked_add(rank)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [[streams]]
        id = "w0"
        address = "http://w0:30000"
        endpoint = "tcp://w0:5557"
        replay_endpoint = "tcp://w0:6557"
        ranks = 2

        [[streams]]
        id = "w1"
        endpoint = "tcp://w1:5557"
        topic = "kv"
        rank = 3
        copies = "count"
        clear_tiers = ["HBM", "DRAM"]
        worker_grace_ms = 0
        ranks = [1, 5]
    "#;

    fn toml(text: &str) -> Result<Vec<Config>, StreamsError> {
        parse(&Settings::default(), "f", &toml::from_str(text).expect("TOML"))
    }

    #[test]
    fn ranks_move_ports_and_ids() {
        let configs = toml(FILE).expect("streams");
        let rows: Vec<_> = configs
            .iter()
            .map(|config| {
                let Config { worker_id, rank, source, .. } = config;
                (worker_id.as_str(), *rank, source.endpoint.as_str(), source.replay.as_deref())
            })
            .collect();
        assert_eq!(
            rows,
            [
                ("w0-dp0", Some(0), "tcp://w0:5557", Some("tcp://w0:6557")),
                ("w0-dp1", Some(1), "tcp://w0:5558", Some("tcp://w0:6558")),
                ("w1-dp1", Some(1), "tcp://w1:5558", None),
                ("w1-dp5", Some(5), "tcp://w1:5562", None),
            ]
        );
        assert_eq!((configs[3].grace, configs[3].clear_tiers.len()), (None, 2));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let rows = [
            ("", "no list of streams"),
            ("streams = []", "no stream"),
            ("streams = [1]", "no table"),
            ("[[streams]]\nid = 'a'\ncolour = 'red'", "colour"),
            ("[[streams]]\ntopic = 'a'", "KV_INDEXER_WORKER_ID"),
            ("[[streams]]\nid = 'a'\n[[streams]]\nid = 'a'", "twice"),
            ("[[streams]]\nid = 'a'\nendpoint = 'tcp://h:65535'\nranks = 2", "rank 1"),
            ("[[streams]]\nid = 'a'\nendpoint = 'ipc:///x'\nranks = 2", "rank 0"),
            ("[[streams]]\nid = 'a'\nranks = 'all'", "ranks"),
        ];
        for (text, told) in rows {
            let error = toml(text).expect_err(text).to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
