//! Named settings: one table makes the flags, the help and the variables.
//!
//! A setting has the name of its environment variable; its flag is that name in
//! kebab case and wins over the variable. Parsing is typed and every error
//! names the setting, the value and what it takes, so that a start that fails
//! says in one line what to mend. Nothing here reads the environment: a binary
//! passes its arguments and a look-up in, tests pass a map.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;

use clap::{Arg, ArgAction, Command};

/// One row of a binary's table of settings.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Environment variable, in capitals.
    pub name: &'static str,
    /// Shown for the value in the help, e.g. `ADDR`.
    pub value: &'static str,
    /// Value in force when the setting is absent; `None` where that is a state of its own.
    pub default: Option<&'static str>,
    /// One sentence: what it does, with its unit.
    pub help: &'static str,
}

/// The filter of a binary's log, in the syntax of `tracing`.
pub const LOG_FILTER: Setting = Setting {
    name: "RUST_LOG",
    value: "FILTER",
    default: Some("info"),
    help: "What to log, such as info or sgl_kv_indexer=debug.",
};

/// What [`LOG_FILTER`] takes, for its errors.
pub const LOG_FILTER_TAKES: &str = "a level such as info, or a list of target=level";

/// The form of a binary's log.
pub const LOG_FORMAT: Setting = Setting {
    name: "KV_INDEXER_LOG_FORMAT",
    value: "human|json",
    default: Some("human"),
    help: "Form of the log: human, or json with one object per line.",
};

/// A setting that is missing or has a value it does not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingError {
    /// The setting's variable.
    pub name: &'static str,
    /// The value found, `None` when it is required and absent.
    pub value: Option<String>,
    /// What the setting takes.
    pub takes: String,
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}={value:?}: takes {}", self.name, self.takes),
            None => write!(f, "{} is not set: takes {}", self.name, self.takes),
        }
    }
}

impl std::error::Error for SettingError {}

/// The values of a binary's settings, flags already laid over variables.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    values: HashMap<&'static str, String>,
}

/// What a command line asked for.
#[derive(Debug)]
pub enum Invocation {
    /// Start with these settings.
    Run(Settings),
    /// Print this text and exit with this code: help, version, or a bad flag.
    Exit {
        /// Text to print.
        text: String,
        /// Exit code: 0 for help and version, 2 for a bad flag.
        code: u8,
    },
}

impl Settings {
    /// Reads a command line over a look-up of variables.
    ///
    /// An empty variable counts as absent, as shells and manifests use it so.
    ///
    /// # Errors
    /// A variable that is not UTF-8.
    pub fn read(
        table: &'static [Setting],
        command: Command,
        arguments: impl IntoIterator<Item = OsString>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Invocation, SettingError> {
        let command = table.iter().fold(command, |command, setting| command.arg(argument(setting)));
        let matches = match command.try_get_matches_from(arguments) {
            Ok(matches) => matches,
            Err(error) => {
                let code = u8::try_from(error.exit_code()).unwrap_or(2);
                return Ok(Invocation::Exit { text: error.render().to_string(), code });
            }
        };
        let mut values = HashMap::new();
        for setting in table {
            if let Some(value) = matches.get_one::<String>(setting.name) {
                values.insert(setting.name, value.clone());
            } else if let Some(value) = variable(setting.name) {
                let value = value.into_string().map_err(|raw| SettingError {
                    name: setting.name,
                    value: Some(raw.to_string_lossy().into_owned()),
                    takes: "text in UTF-8".to_owned(),
                })?;
                if !value.is_empty() {
                    values.insert(setting.name, value);
                }
            }
        }
        Ok(Invocation::Run(Settings { values }))
    }

    /// Settings from pairs, for tests and embedders.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (&'static str, &'static str)>) -> Self {
        Settings { values: pairs.into_iter().map(|(name, value)| (name, value.to_owned())).collect() }
    }

    /// These settings with others laid over them.
    #[must_use]
    pub fn overlaid(&self, over: impl IntoIterator<Item = (&'static Setting, String)>) -> Self {
        let mut values = self.values.clone();
        values.extend(over.into_iter().map(|(setting, value)| (setting.name, value)));
        Settings { values }
    }

    /// The value given for `setting`, else its default.
    pub fn get(&self, setting: &Setting) -> Option<&str> {
        self.values.get(setting.name).map(String::as_str).or(setting.default)
    }

    /// What a table's settings are, `NAME=value` by `NAME=value`, for the log. Those that
    /// are absent are left out. No setting is a secret: secrets come from files.
    pub fn in_force(&self, table: &[Setting]) -> String {
        let set = table.iter().filter_map(|setting| Some((setting.name, self.get(setting)?)));
        // Quoted where a value could else break the line or look like a further setting.
        let is_plain = |value: &str| value.chars().all(|c| c.is_ascii_graphic() && c != '"' && c != '\\');
        let texts = set.map(|(name, value)| match is_plain(value) {
            true => format!("{name}={value}"),
            false => format!("{name}={value:?}"),
        });
        texts.collect::<Vec<_>>().join(" ")
    }

    /// The value of `setting` through `parse`; `takes` says in an error what is taken.
    ///
    /// # Errors
    /// The value does not parse, or is absent and has no default.
    pub fn parse<T>(
        &self,
        setting: &Setting,
        takes: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, SettingError> {
        let value = self.get(setting);
        value.and_then(parse).ok_or_else(|| SettingError {
            name: setting.name,
            value: value.map(str::to_owned),
            takes: takes.to_owned(),
        })
    }

    /// Like [`Settings::parse`], but absent without a default is `None`.
    ///
    /// # Errors
    /// The value does not parse.
    pub fn parse_optional<T>(
        &self,
        setting: &Setting,
        takes: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, SettingError> {
        if self.get(setting).is_none() {
            return Ok(None);
        }
        self.parse(setting, takes, parse).map(Some)
    }
}

fn argument(setting: &Setting) -> Arg {
    let default = match setting.default {
        Some("") => " [default: empty]".to_owned(),
        Some(value) => format!(" [default: {value}]"),
        None => String::new(),
    };
    Arg::new(setting.name)
        .long(setting.name.to_ascii_lowercase().replace('_', "-"))
        .value_name(setting.value)
        .action(ArgAction::Set)
        .help(format!("{}{default} [env: {}]", setting.help, setting.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[Setting] = &[
        Setting { name: "KV_TEST_PORT", value: "PORT", default: Some("7"), help: "Port." },
        Setting { name: "KV_TEST_NAME", value: "NAME", default: None, help: "Name." },
    ];

    fn read(arguments: &[&str], variables: &[(&str, &str)]) -> Settings {
        let arguments = std::iter::once("kv-test").chain(arguments.iter().copied()).map(OsString::from);
        let variable = |name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(*value))
        };
        match Settings::read(TABLE, Command::new("kv-test"), arguments, variable).expect("UTF-8") {
            Invocation::Run(settings) => settings,
            Invocation::Exit { text, .. } => panic!("{text}"),
        }
    }

    #[test]
    fn a_flag_wins_over_a_variable_and_a_variable_over_the_default() {
        let port = &TABLE[0];
        assert_eq!(read(&[], &[]).get(port), Some("7"));
        assert_eq!(read(&[], &[("KV_TEST_PORT", "8")]).get(port), Some("8"));
        assert_eq!(read(&["--kv-test-port", "9"], &[("KV_TEST_PORT", "8")]).get(port), Some("9"));
        assert_eq!(read(&[], &[("KV_TEST_PORT", "")]).get(port), Some("7"));
    }

    #[test]
    fn errors_name_the_setting_the_value_and_what_it_takes() {
        let settings = read(&[], &[("KV_TEST_PORT", "x")]);
        let error = settings.parse(&TABLE[0], "a port", |text| text.parse::<u16>().ok()).unwrap_err();
        assert_eq!(error.to_string(), "KV_TEST_PORT=\"x\": takes a port");
        let error = settings.parse(&TABLE[1], "a name", |text| Some(text.to_owned())).unwrap_err();
        assert_eq!(error.to_string(), "KV_TEST_NAME is not set: takes a name");
        assert_eq!(settings.parse_optional(&TABLE[1], "a name", |text| Some(text.to_owned())), Ok(None));
    }

    #[test]
    fn what_is_in_force_is_told_in_one_line() {
        let settings = read(&["--kv-test-name", "a b\nKV=1"], &[]);
        assert_eq!(settings.in_force(TABLE), r#"KV_TEST_PORT=7 KV_TEST_NAME="a b\nKV=1""#);
        assert_eq!(read(&[], &[]).in_force(TABLE), "KV_TEST_PORT=7");
    }

    #[test]
    fn an_unknown_flag_exits_with_two() {
        let arguments = ["kv-test", "--no-such"].map(OsString::from);
        let invocation = Settings::read(TABLE, Command::new("kv-test"), arguments, |_| None).expect("UTF-8");
        assert!(matches!(invocation, Invocation::Exit { code: 2, .. }), "{invocation:?}");
    }
}
