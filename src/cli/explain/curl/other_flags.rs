//! The flags of curl that are accepted because command lines have them, and those that are refused by name.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// Flags that change nothing about the request, and flags that describe a request which `explain` cannot make.
///
/// The first that is refused says what to give instead.
#[derive(Debug)]
pub(super) struct OtherFlags {
    pub(super) refused: Option<String>,
}

/// What to give in the place of a form.
const MULTIPART: &str = "explain makes no multipart body: give the body as it is sent with --data-binary @FILE, and its type with \
                         -H 'Content-Type: multipart/form-data; boundary=...'";

/// A flag, by its letter if it has one, and by its name.
type Flag = (Option<char>, &'static str);

impl OtherFlags {
    /// Switches that change nothing.
    const SWITCHES: [Flag; 25] = [
        (Some('i'), "include"),
        (Some('s'), "silent"),
        (Some('S'), "show-error"),
        (Some('k'), "insecure"),
        (Some('L'), "location"),
        (Some('v'), "verbose"),
        (Some('f'), "fail"),
        (None, "fail-with-body"),
        (Some('N'), "no-buffer"),
        (Some('O'), "remote-name"),
        (Some('#'), "progress-bar"),
        (None, "no-progress-meter"),
        (None, "create-dirs"),
        (None, "retry-all-errors"),
        (None, "retry-connrefused"),
        (None, "http1.1"),
        (None, "http2"),
        (None, "http2-prior-knowledge"),
        (None, "http3"),
        (None, "tlsv1.2"),
        (None, "tlsv1.3"),
        (None, "no-keepalive"),
        (Some('4'), "ipv4"),
        (Some('6'), "ipv6"),
        // `explain` takes every path as it is, unlike curl.
        (None, "path-as-is"),
    ];

    /// Flags with a value that change nothing.
    const WITH_VALUE: [Flag; 18] = [
        (Some('o'), "output"),
        (Some('m'), "max-time"),
        (Some('w'), "write-out"),
        (Some('D'), "dump-header"),
        // Its letter names the configuration file here.
        (None, "cookie-jar"),
        (None, "connect-timeout"),
        (None, "retry"),
        (None, "retry-delay"),
        (None, "retry-max-time"),
        (None, "max-redirs"),
        (None, "limit-rate"),
        (None, "cacert"),
        (None, "resolve"),
        (None, "connect-to"),
        (None, "interface"),
        (None, "noproxy"),
        (None, "proto"),
        (None, "unix-socket"),
    ];

    /// Flags that change the request in a way that is not read, whether each has a value, and what to give instead.
    const REFUSED: [(Flag, bool, &str); 5] = [
        ((Some('F'), "form"), true, MULTIPART),
        ((None, "form-string"), true, MULTIPART),
        ((Some('T'), "upload-file"), true, "give -X PUT --data-binary @FILE -H Content-Type: instead"),
        ((Some('I'), "head"), false, "give -X HEAD instead"),
        ((Some('E'), "cert"), true, "give the client's certificate in PEM with --client-cert FILE instead"),
    ];

    fn arg((short, long): Flag, has_value: bool) -> Arg {
        let arg = Arg::new(long).short(short).long(long).hide(true);
        match has_value {
            true => arg.action(ArgAction::Append).value_name("VALUE").allow_hyphen_values(true),
            false => arg.action(ArgAction::SetTrue).overrides_with(long),
        }
    }
}

impl Args for OtherFlags {
    fn augment_args(command: Command) -> Command {
        command
            .args(Self::SWITCHES.map(|flag| Self::arg(flag, false)))
            .args(Self::WITH_VALUE.map(|flag| Self::arg(flag, true)))
            .args(Self::REFUSED.map(|(flag, has_value, _)| Self::arg(flag, has_value)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for OtherFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |(_, long): Flag| matches.value_source(long) == Some(clap::parser::ValueSource::CommandLine);
        let refused = Self::REFUSED.into_iter().find(|(flag, _, _)| given(*flag)).map(|((short, long), _, instead)| {
            let name = short.map_or_else(|| format!("--{long}"), |short| format!("-{short} (--{long})"));
            format!("{name} is not read: {instead}")
        });
        Ok(Self { refused })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
