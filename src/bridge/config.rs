//! The bridge's settings, read and checked: one engine's stream, one server.
//!
//! Every rule about a value is here, so that what follows cannot meet a bad one.
//! It reads no environment; the binary passes a look-up in, tests pass a map.
//! Cost: none after the start.

use std::path::PathBuf;
use std::time::Duration;

use http::Uri;

use super::copies::Reading;
use super::credentials::{self, Credentials};
use super::event::{FULL, MAMBA, SWA};
use super::store::MIRROR_DIR;
use crate::pb::{TierType as Tier, WorkerCacheSpec};
use crate::settings::{LOG_FILTER, LOG_FORMAT, Setting, SettingError, Settings};

const WORKER_ID: Setting = Setting {
    name: "KV_INDEXER_WORKER_ID",
    value: "NAME",
    default: None,
    help: "Name of the worker in the index, unique in the fleet. Required.",
};
const WORKER_ADDRESS: Setting = Setting {
    name: "KV_INDEXER_WORKER_ADDRESS",
    value: "URL",
    default: None,
    help: "URL under which routers reach the worker, byte for byte as they know it. Without it the worker is \
           indexed but never offered to a router.",
};
const ENDPOINT: Setting = Setting {
    name: "KV_INDEXER_ENDPOINT",
    value: "URL,...",
    default: Some("http://[::1]:50051"),
    help: "The server: http://HOST:PORT, https://HOST:PORT or unix:PATH. Several, with commas, are each told \
           everything at their own pace.",
};
const IDLE_REPORT_MS: Setting = Setting {
    name: "KV_INDEXER_IDLE_REPORT_MS",
    value: "MILLISECONDS",
    default: Some("1000"),
    help: "How long a server that there is nothing to tell is told nothing. An empty report then shows that the \
           worker lives, and whether the server has begun anew. 0 sends none.",
};
const MIRROR_MAX_BLOCKS: Setting = Setting {
    name: "KV_INDEXER_MIRROR_MAX_BLOCKS",
    value: "BLOCKS",
    default: Some("20000000"),
    help: "Most distinct blocks that the process keeps to tell a server anew, 24 bytes each. What does not fit is not \
           reported, and the stream is incomplete.",
};
const EVENT_ENDPOINT: Setting = Setting {
    name: "SGLANG_KV_EVENT_ENDPOINT",
    value: "ENDPOINT",
    default: Some("tcp://127.0.0.1:5557"),
    help: "The engine's KV event publisher: tcp://HOST:PORT or ipc://PATH.",
};
const EVENT_BIND: Setting = Setting {
    name: "SGLANG_KV_EVENT_BIND",
    value: "auto|true|false",
    default: Some("auto"),
    help: "Whether to bind the event endpoint, for a publisher that connects because its own endpoint names a \
           host. auto binds when the host is *, 0.0.0.0 or [::].",
};
const EVENT_TOPIC: Setting = Setting {
    name: "SGLANG_KV_EVENT_TOPIC",
    value: "TOPIC",
    default: Some(""),
    help: "The publisher's topic, compared whole. Empty takes every topic.",
};
const REPLAY_ENDPOINT: Setting = Setting {
    name: "SGLANG_KV_REPLAY_ENDPOINT",
    value: "ENDPOINT",
    default: None,
    help: "The engine's replay socket: tcp://HOST:PORT or ipc://PATH. History is asked for at each connect, and \
           batches that went missing are repaired; without it they are only counted.",
};
const HEARTBEAT_MS: Setting = Setting {
    name: "KV_INDEXER_HEARTBEAT_MS",
    value: "MILLISECONDS",
    default: Some("10000"),
    help: "Silence after which a publisher is asked whether it is there, at least 10; it has as long to answer. A \
           replay socket may be silent for half of it.",
};
const RANK: Setting = Setting {
    name: "KV_INDEXER_RANK",
    value: "NUMBER",
    default: None,
    help: "Data-parallel rank that the batches have to be of, where they say one; others are skipped and counted.",
};
const COPIES: Setting = Setting {
    name: "KV_INDEXER_COPIES",
    value: "auto|set|count",
    default: Some("auto"),
    help: "How stores and removals are read: count takes a block away with its last copy, set with the first \
           removal. auto counts for vLLM and not for SGLang, by what arrives. vLLM with \
           kv_cache_report_mode=full needs set.",
};
const WORKER_GRACE_MS: Setting = Setting {
    name: "KV_INDEXER_WORKER_GRACE_MS",
    value: "MILLISECONDS",
    default: Some("30000"),
    help: "How long the publisher may be gone before the worker's placements are withdrawn; 0 is never.",
};
const CLEAR_TIERS: Setting = Setting {
    name: "KV_INDEXER_CLEAR_TIERS",
    value: "TIERS",
    default: Some("HBM,DRAM,SSD"),
    help: "Tiers that are emptied when the engine clears its cache.",
};
const CACHE_COMPONENTS: Setting = Setting {
    name: "KV_INDEXER_CACHE_COMPONENTS",
    value: "NAMES",
    default: None,
    help: "The worker's caches: full, swa, mamba; full is implied. Only for engines whose events name \
           components. Without it blocks match whole.",
};
const SWA_WINDOW_TOKENS: Setting = Setting {
    name: "KV_INDEXER_SWA_WINDOW_TOKENS",
    value: "TOKENS",
    default: None,
    help: "Window of the sliding-window attention, in tokens. Required with swa.",
};
const FULL_TIERS: Setting = Setting {
    name: "KV_INDEXER_FULL_TIERS",
    value: "TIERS",
    default: Some("HBM,DRAM"),
    help: "Tiers from which full-attention blocks can be reused.",
};
const SWA_TIERS: Setting = Setting {
    name: "KV_INDEXER_SWA_TIERS",
    value: "TIERS",
    default: Some("HBM,DRAM"),
    help: "Tiers from which sliding-window blocks can be reused.",
};
const MAMBA_TIERS: Setting = Setting {
    name: "KV_INDEXER_MAMBA_TIERS",
    value: "TIERS",
    default: Some("HBM,DRAM"),
    help: "Tiers from which Mamba states can be reused.",
};
const CACHE_SPEC_VERSION: Setting = Setting {
    name: "KV_INDEXER_CACHE_SPEC_VERSION",
    value: "NUMBER",
    default: Some("1"),
    help: "Version of the rules that the components follow; a server never matches one that it does not know.",
};

const STREAMS: Setting = Setting {
    name: "KV_INDEXER_STREAMS",
    value: "FILE",
    default: None,
    help: "File of many streams, .toml or .json, instead of one worker's settings; the other settings hold for \
           every stream that does not set its own.",
};

/// Where the binary serves HTTP; read by `observe`.
pub(super) const HTTP_ADDR: Setting = Setting {
    name: "KV_INDEXER_HTTP_ADDR",
    value: "ADDR|off",
    default: Some("off"),
    help: "IP address and port of the status page, the probes /healthz and /readyz, /metrics and /debug/state, \
           such as [::1]:9465.",
};

/// The bridge's settings, in the order of its help.
pub const TABLE: &[Setting] = &[
    WORKER_ID,
    WORKER_ADDRESS,
    ENDPOINT,
    IDLE_REPORT_MS,
    MIRROR_MAX_BLOCKS,
    MIRROR_DIR,
    credentials::CA_FILE,
    credentials::CLIENT_CERT_FILE,
    credentials::CLIENT_KEY_FILE,
    credentials::TOKEN_FILE,
    EVENT_ENDPOINT,
    EVENT_BIND,
    EVENT_TOPIC,
    REPLAY_ENDPOINT,
    HEARTBEAT_MS,
    RANK,
    COPIES,
    WORKER_GRACE_MS,
    CLEAR_TIERS,
    CACHE_COMPONENTS,
    SWA_WINDOW_TOKENS,
    FULL_TIERS,
    SWA_TIERS,
    MAMBA_TIERS,
    CACHE_SPEC_VERSION,
    STREAMS,
    HTTP_ADDR,
    LOG_FORMAT,
    LOG_FILTER,
];

/// Keys of a stream in a file of streams, and the settings they stand for.
const STREAM_KEYS: &[(&str, &Setting)] = &[
    ("id", &WORKER_ID),
    ("address", &WORKER_ADDRESS),
    ("server", &ENDPOINT),
    ("idle_report_ms", &IDLE_REPORT_MS),
    ("mirror_max_blocks", &MIRROR_MAX_BLOCKS),
    ("mirror_dir", &MIRROR_DIR),
    ("endpoint", &EVENT_ENDPOINT),
    ("bind", &EVENT_BIND),
    ("topic", &EVENT_TOPIC),
    ("replay_endpoint", &REPLAY_ENDPOINT),
    ("heartbeat_ms", &HEARTBEAT_MS),
    ("rank", &RANK),
    ("copies", &COPIES),
    ("worker_grace_ms", &WORKER_GRACE_MS),
    ("clear_tiers", &CLEAR_TIERS),
    ("cache_components", &CACHE_COMPONENTS),
    ("swa_window_tokens", &SWA_WINDOW_TOKENS),
    ("full_tiers", &FULL_TIERS),
    ("swa_tiers", &SWA_TIERS),
    ("mamba_tiers", &MAMBA_TIERS),
    ("cache_spec_version", &CACHE_SPEC_VERSION),
];

/// The setting that a stream's key stands for.
pub(super) fn stream_setting(key: &str) -> Option<&'static Setting> {
    STREAM_KEYS.iter().find(|(name, _)| *name == key).map(|(_, setting)| *setting)
}

/// Path of the file of streams, when there is one.
pub fn streams_file(settings: &Settings) -> Option<&str> {
    settings.get(&STREAMS)
}

/// Where an engine's events come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// `tcp://HOST:PORT` or `ipc://PATH`, as the socket takes it.
    pub endpoint: String,
    /// Whether the bridge binds it, because the publisher connects.
    pub bind: bool,
    /// The publisher's topic; empty takes every topic.
    pub topic: String,
    /// The publisher's replay socket, if it has one.
    pub replay: Option<String>,
    /// Silence after which either is asked whether it is there.
    pub heartbeat: Duration,
}

/// What a bridge does, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Name of the worker in the index.
    pub worker_id: String,
    /// Where routers reach it; empty when they cannot.
    pub worker_address: String,
    /// The servers, at least one.
    pub servers: Vec<String>,
    /// How the servers are known, and what they are shown.
    pub credentials: Credentials,
    /// The engine's stream.
    pub source: Source,
    /// Rank that its batches have to be of.
    pub rank: Option<i64>,
    /// How its stores and removals are read.
    pub copies: Reading,
    /// How long the publisher may be gone before its placements are withdrawn.
    pub grace: Option<Duration>,
    /// How long a server is told nothing while there is nothing to tell; `None` for ever.
    pub idle_report: Option<Duration>,
    /// Distinct blocks at which the process's mirror takes no further one.
    pub mirror_blocks_max: usize,
    /// Where the mirror is kept on disk, if it is.
    pub mirror_dir: Option<PathBuf>,
    /// Tiers that a clear empties; never empty.
    pub clear_tiers: Vec<Tier>,
    /// How the worker's caches decide what can be reused; `None` for whole blocks.
    pub cache_spec: Option<WorkerCacheSpec>,
}

/// Least heartbeat: below it a peer that is only busy would be thought gone.
const HEARTBEAT_MS_MIN: u32 = 10;

const TIER_NAMES: &str =
    "a comma-separated list of tiers: HBM (or GPU), DRAM (or CPU, CPU_PINNED), SSD (or DISK)";

impl Config {
    /// Reads the settings of [`TABLE`].
    ///
    /// # Errors
    /// The first setting that is missing or has a value it does not take.
    pub fn read(settings: &Settings) -> Result<Self, SettingError> {
        let worker_id = settings.parse(&WORKER_ID, "the worker's name in the index", |text| {
            Some(text.trim()).filter(|text| !text.is_empty()).map(str::to_owned)
        })?;
        let servers = settings.parse(
            &ENDPOINT,
            "http://HOST:PORT, https://HOST:PORT or unix:PATH, or several with commas, none of them twice",
            servers,
        )?;
        let (endpoint, wildcard) =
            settings.parse(&EVENT_ENDPOINT, "tcp://HOST:PORT or ipc://PATH", event_endpoint)?;
        let bind = settings.parse(&EVENT_BIND, "auto, true or false", |text| {
            match text.to_ascii_lowercase().as_str() {
                "auto" => Some(wildcard),
                "true" | "1" => Some(true),
                "false" | "0" => Some(false),
                _ => None,
            }
        })?;
        if wildcard && !bind {
            return Err(SettingError {
                name: EVENT_BIND.name,
                value: Some("false".to_owned()),
                takes: format!("auto or true while {} names every address", EVENT_ENDPOINT.name),
            });
        }
        let replay = settings.parse_optional(&REPLAY_ENDPOINT, "tcp://HOST:PORT or ipc://PATH", |text| {
            event_endpoint(text).filter(|(_, wildcard)| !wildcard).map(|(endpoint, _)| endpoint)
        })?;
        let heartbeat =
            settings.parse(&HEARTBEAT_MS, "a whole number of milliseconds, at least 10", |text| {
                text.trim().parse::<u32>().ok().filter(|milliseconds| *milliseconds >= HEARTBEAT_MS_MIN)
            })?;
        let rank = settings.parse_optional(&RANK, "a whole number", |text| {
            text.trim().parse::<i64>().ok().filter(|rank| *rank >= 0)
        })?;
        let copies = settings.parse(&COPIES, "auto, set or count", |text| {
            match text.to_ascii_lowercase().as_str() {
                "auto" => Some(Reading::Auto),
                "set" => Some(Reading::Set),
                "count" => Some(Reading::Count),
                _ => None,
            }
        })?;
        let grace = settings.parse(&WORKER_GRACE_MS, "a whole number of milliseconds", |text| {
            text.trim().parse::<u32>().ok()
        })?;
        let idle = settings.parse(&IDLE_REPORT_MS, "a whole number of milliseconds", |text| {
            text.trim().parse::<u32>().ok()
        })?;
        let mirror_blocks_max =
            settings.parse(&MIRROR_MAX_BLOCKS, "a whole number of blocks, 1 to 4000000000", |text| {
                text.trim().parse::<usize>().ok().filter(|blocks| (1..=4_000_000_000).contains(blocks))
            })?;
        let credentials = Credentials::from_settings(settings, &servers)?;
        Ok(Config {
            worker_id,
            worker_address: settings.get(&WORKER_ADDRESS).unwrap_or_default().to_owned(),
            servers,
            credentials,
            source: Source {
                endpoint,
                bind,
                topic: settings.get(&EVENT_TOPIC).unwrap_or_default().to_owned(),
                replay,
                heartbeat: Duration::from_millis(u64::from(heartbeat)),
            },
            rank,
            copies,
            grace: (grace > 0).then(|| Duration::from_millis(u64::from(grace))),
            idle_report: (idle > 0).then(|| Duration::from_millis(u64::from(idle))),
            mirror_blocks_max,
            mirror_dir: settings.get(&MIRROR_DIR).map(PathBuf::from),
            clear_tiers: settings.parse(&CLEAR_TIERS, TIER_NAMES, tiers)?,
            cache_spec: cache_spec(settings)?,
        })
    }
}

/// Reads the cache spec. Values that the components make no use of are checked all the same.
fn cache_spec(settings: &Settings) -> Result<Option<WorkerCacheSpec>, SettingError> {
    const NUMBER: &str = "a whole number of 32 bits";
    let components = settings.parse_optional(
        &CACHE_COMPONENTS,
        "a comma-separated list of full, swa and mamba",
        components,
    )?;
    let window = settings.parse_optional(&SWA_WINDOW_TOKENS, "a number of tokens, at least 1", |text| {
        text.trim().parse::<u32>().ok().filter(|tokens| *tokens > 0)
    })?;
    let version = settings.parse(&CACHE_SPEC_VERSION, NUMBER, |text| text.trim().parse::<u32>().ok())?;
    let tier_mask = |setting| settings.parse(setting, TIER_NAMES, tiers).map(|tiers| mask_of(&tiers));
    let (full, swa, mamba) = (tier_mask(&FULL_TIERS)?, tier_mask(&SWA_TIERS)?, tier_mask(&MAMBA_TIERS)?);
    let Some(components) = components else { return Ok(None) };
    let has = |bit, mask| if components & bit == 0 { 0 } else { mask };
    if components & SWA != 0 && window.is_none() {
        return Err(SettingError {
            name: SWA_WINDOW_TOKENS.name,
            value: None,
            takes: format!("a number of tokens, at least 1, when {} has swa", CACHE_COMPONENTS.name),
        });
    }
    Ok(Some(WorkerCacheSpec {
        version,
        components,
        swa_window_tokens: has(SWA, window.unwrap_or(0)),
        full_tier_mask: full,
        swa_tier_mask: has(SWA, swa),
        mamba_tier_mask: has(MAMBA, mamba),
    }))
}

fn components(text: &str) -> Option<u32> {
    text.split(',').try_fold(FULL, |mask, name| match name.trim().to_ascii_lowercase().as_str() {
        "full" => Some(mask | FULL),
        "swa" => Some(mask | SWA),
        "mamba" => Some(mask | MAMBA),
        _ => None,
    })
}

/// The tiers of a list, each once, in order of tier.
fn tiers(text: &str) -> Option<Vec<Tier>> {
    let mut tiers = text
        .split(',')
        .map(|name| match name.trim().to_ascii_uppercase().as_str() {
            "HBM" | "GPU" => Some(Tier::TierHbm),
            "DRAM" | "CPU" | "CPU_PINNED" => Some(Tier::TierDram),
            "SSD" | "DISK" => Some(Tier::TierSsd),
            _ => None,
        })
        .collect::<Option<Vec<Tier>>>()?;
    tiers.sort_unstable();
    tiers.dedup();
    Some(tiers)
}

fn mask_of(tiers: &[Tier]) -> u32 {
    tiers.iter().fold(0, |mask, tier| mask | 1 << i32::from(*tier))
}

fn servers(text: &str) -> Option<Vec<String>> {
    let servers: Vec<String> = text.split(',').map(|server| server.trim().to_owned()).collect();
    let distinct = servers.iter().enumerate().all(|(place, server)| !servers[..place].contains(server));
    (distinct && servers.iter().all(|server| is_server(server))).then_some(servers)
}

fn is_server(text: &str) -> bool {
    if let Some(path) = text.strip_prefix("unix:") {
        return !path.trim_start_matches('/').is_empty();
    }
    let Ok(uri) = text.parse::<Uri>() else { return false };
    matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty())
}

/// The endpoint as the socket takes it, and whether its host means every address.
fn event_endpoint(text: &str) -> Option<(String, bool)> {
    if let Some(path) = text.strip_prefix("ipc://") {
        return (!path.is_empty() && path != "*").then(|| (text.to_owned(), false));
    }
    let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = port.parse::<u16>().ok()?;
    let (host, wildcard) = match host {
        "" => return None,
        "*" | "0.0.0.0" => ("0.0.0.0", true),
        "::" | "[::]" => ("[::]", true),
        host => (host, false),
    };
    Some((format!("tcp://{host}:{port}"), wildcard))
}

#[cfg(test)]
mod tests;
