//! The URL of a server, taken apart.
//!
//! It holds a password, and one that is not percent-encoded as it should be makes a URL of other parts than were meant:
//! what stands left of an `@` looks like a host, a port or a database. So nothing of what is wrong is shown but names of
//! parameters, and what has an `@` too many is refused before any of it is taken for something else.

use super::Wrong;
use crate::config::suggest::nearest;
use crate::idempotency::key::percent_decode;

/// What differs from one kind of URL to another.
pub(in crate::config) struct UrlGrammar {
    /// What it is called.
    pub kind: &'static str,
    /// What it looks like.
    pub form: &'static str,
    /// What stands between a user and the `@` where the password between them is not shown.
    pub hidden_password: &'static str,
    /// Every parameter that it may have, with spaces between, for hints.
    pub parameters: &'static str,
    /// What to do about a parameter that looks like none of them.
    pub otherwise: &'static str,
    /// The key that names a file with the password.
    pub password_file: &'static str,
}

/// The parts of a URL, decoded. No `Debug`: it would show the password.
#[cfg_attr(test, derive(PartialEq, Eq))]
pub(in crate::config) struct Location {
    /// Before the `@`, up to a colon.
    pub user: Option<String>,
    /// Before the `@`, behind a colon; or the parameter `password`.
    pub password: Option<Vec<u8>>,
    /// Whether a user stands there without a colon: some take that for the password.
    pub is_user_alone: bool,
    /// Behind the `@`: hosts with their ports.
    pub hosts: Vec<(String, Option<u16>)>,
    /// Behind the slash.
    pub database: Option<String>,
    /// Behind the question mark, without `password`. No name stands twice.
    pub parameters: Vec<(String, String)>,
    /// Whether `password` stood among them: where it has an `&` that is not encoded, what follows looks like one more.
    pub is_password_among_them: bool,
    /// The URL as it was written, without its password.
    pub shown: String,
}

/// Takes apart what stands behind the colon of `scheme`.
pub(in crate::config) fn take_apart(grammar: &UrlGrammar, scheme: &str, text: &str) -> Result<Location, Wrong> {
    let Some(rest) = text.strip_prefix("//") else {
        return Err(Wrong::new(format!("two slashes follow `{scheme}:`")).hint(grammar.form));
    };
    if rest.chars().any(|char| char.is_whitespace() || char.is_control() || char == '#') {
        return Err(grammar.encoded("white space, control characters and `#`"));
    }
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let (authority, path) = rest.split_once('/').map_or((rest, None), |(authority, path)| (authority, Some(path)));
    // Behind the hosts it is most likely that of a password with a slash or a question mark in it.
    if authority.matches('@').count() > 1 || path.is_some_and(has_at) || query.is_some_and(has_at) {
        return Err(grammar.encoded("an `@` but the one before the hosts"));
    }
    let (userinfo, hosts) = authority.split_once('@').map_or((None, authority), |(user, hosts)| (Some(user), hosts));
    let (user, password) = match userinfo.map(|userinfo| userinfo.split_once(':').unwrap_or((userinfo, ""))) {
        Some((user, password)) => (Some(user), Some(password).filter(|password| !password.is_empty())),
        None => (None, None),
    };
    let host = |text| grammar.host(text);
    let mut location = Location {
        user: user.filter(|user| !user.is_empty()).map(|user| grammar.decoded("the user", user)).transpose()?,
        password: password.map(|password| grammar.decoded_bytes("the password", password)).transpose()?,
        is_user_alone: userinfo.is_some_and(|userinfo| !userinfo.is_empty() && !userinfo.contains(':')),
        hosts: if hosts.is_empty() { Vec::new() } else { hosts.split(',').map(host).collect::<Result<_, _>>()? },
        database: path.filter(|path| !path.is_empty()).map(|path| grammar.database(path)).transpose()?,
        parameters: Vec::new(),
        is_password_among_them: false,
        shown: String::new(),
    };
    let mut written = Vec::new();
    for pair in query.into_iter().flat_map(|query| query.split('&')).filter(|pair| !pair.is_empty()) {
        if location.read_parameter(grammar, pair)? {
            written.push(pair);
        }
    }
    let user = user.map_or_else(String::new, |user| format!("{user}{}@", grammar.hidden_password));
    let path = path.map_or_else(String::new, |path| format!("/{path}"));
    let query = if written.is_empty() { String::new() } else { format!("?{}", written.join("&")) };
    location.shown = format!("{scheme}://{user}{hosts}{path}{query}");
    Ok(location)
}

impl Location {
    /// Reads `NAME=VALUE`; false where it is the password.
    fn read_parameter(&mut self, grammar: &UrlGrammar, pair: &str) -> Result<bool, Wrong> {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(Wrong::new("a parameter has no `=`").hint("write ?NAME=VALUE, and & before each other one"));
        };
        let name = grammar.decoded("the name of a parameter", name)?;
        if name == "password" {
            let value = grammar.decoded_bytes("the password", value)?;
            if std::mem::replace(&mut self.is_password_among_them, true) || self.password.is_some() {
                return Err(Wrong::new("the password stands twice").hint("remove one of them"));
            }
            self.password = Some(value).filter(|value| !value.is_empty());
            return Ok(false);
        }
        if !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_') {
            let wrong = Wrong::new("a parameter's name has small letters and `_` only");
            return Err(wrong.hint(grammar.how_to_encode()));
        }
        if self.parameters.iter().any(|(known, _)| *known == name) {
            return Err(Wrong::new(format!("the parameter `{name}` stands twice")).hint("remove one of them"));
        }
        let value = grammar.decoded(&format!("the parameter `{name}`"), value)?;
        self.parameters.push((name, value));
        Ok(true)
    }

    /// Takes a parameter out.
    pub(in crate::config) fn take(&mut self, name: &str) -> Option<String> {
        let place = self.parameters.iter().position(|(known, _)| known == name)?;
        Some(self.parameters.remove(place).1)
    }

    /// Takes a parameter out that is one of a few words.
    pub(in crate::config) fn choice<T: Copy>(
        &mut self,
        name: &str,
        words: &[(&str, T)],
        wrong: &mut Vec<Wrong>,
    ) -> Option<T> {
        let value = self.take(name)?;
        let chosen = words.iter().find(|(word, _)| *word == value).map(|(_, meant)| *meant);
        if chosen.is_none() {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            let (last, others) = known.split_last().unwrap_or((&"", &[]));
            let hint = format!("write {name}={}, or remove it for the default", known[0]);
            wrong.push(Wrong::new(format!("`{name}` is {} or {last} here", others.join(", "))).hint(hint));
        }
        chosen
    }

    /// The problems of the parameters that were not read.
    pub(in crate::config) fn unknown(&self, grammar: &UrlGrammar) -> impl Iterator<Item = Wrong> {
        self.parameters.iter().map(|(name, _)| {
            if self.is_password_among_them {
                let wrong = Wrong::new("a parameter beside the password is unknown");
                let file = grammar.password_file;
                return wrong.hint(format!("in a password, write & as %26; or keep it in a file that {file} names"));
            }
            let wrong = Wrong::new(format!("`{name}` is not a parameter of a `{}` URL here", grammar.kind));
            match nearest(name, grammar.parameters.split(' ')) {
                Some(near) => wrong.hint(format!("did you mean `{near}`?")),
                None => wrong.hint(grammar.otherwise),
            }
        })
    }
}

impl UrlGrammar {
    fn how_to_encode(&self) -> String {
        format!(
            "in a password and elsewhere, write @ as %40, : as %3A, / as %2F, ? as %3F, # as %23, & as %26, % as %25; or \
             keep the password in a file that {} names",
            self.password_file
        )
    }

    fn encoded(&self, what: &str) -> Wrong {
        Wrong::new(format!("in a URL, {what} must be percent-encoded")).hint(self.how_to_encode())
    }

    fn database(&self, path: &str) -> Result<String, Wrong> {
        match path.contains('/') {
            true => Err(self.encoded("a second `/`")),
            false => self.decoded("the database", path),
        }
    }

    fn host(&self, text: &str) -> Result<(String, Option<u16>), Wrong> {
        let wrong = || {
            let hint = format!("{}; {}", self.form, self.how_to_encode());
            Wrong::new("a host or its port cannot be read").hint(hint)
        };
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(wrong)?;
                if host.parse::<std::net::Ipv6Addr>().is_err() {
                    return Err(wrong());
                }
                (host.to_owned(), if port.is_empty() { None } else { Some(port.strip_prefix(':').ok_or_else(wrong)?) })
            }
            None => {
                let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
                (self.decoded("a host", host)?, port)
            }
        };
        if host.is_empty() {
            return Err(Wrong::new("a host is missing").hint(self.form));
        }
        let port = port.map(|port| port_number(port).ok_or_else(wrong)).transpose()?;
        Ok((host, port))
    }

    fn decoded(&self, what: &str, text: &str) -> Result<String, Wrong> {
        let text = String::from_utf8(self.decoded_bytes(what, text)?).ok().filter(|text| !text.contains('\0'));
        text.ok_or_else(|| Wrong::new(format!("{what} is not text once it is decoded")).hint(self.how_to_encode()))
    }

    fn decoded_bytes(&self, what: &str, text: &str) -> Result<Vec<u8>, Wrong> {
        percent_decode(text.as_bytes()).ok_or_else(|| {
            let wrong = Wrong::new(format!("{what} has a `%` without two hexadecimal digits"));
            wrong.hint(self.how_to_encode())
        })
    }
}

/// A port. 0 is none that a server listens on.
pub(in crate::config) fn port_number(text: &str) -> Option<u16> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| is_number && *port > 0)
}

/// Whether a host is this machine itself.
pub(in crate::config) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A host and its port, for people.
pub(in crate::config) fn shown_address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn has_at(text: &str) -> bool {
    text.contains('@')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{postgres, redis};
    use super::*;

    fn parts(text: &str) -> Result<Location, Wrong> {
        let (scheme, rest) = text.split_once(':').unwrap();
        let grammar = if scheme.starts_with("redis") { &redis::STORE.grammar } else { &postgres::GRAMMAR };
        take_apart(grammar, scheme, rest)
    }

    #[test]
    fn every_part_is_found_and_decoded() {
        let text = "postgres://ga%40te:p%3Aw:x%2F@db-1:5433,[::1],db-3/my%20db?password_x=1&sslmode=require&options=-c%20a%3Db";
        let location = parts(text).unwrap_or_else(|wrong| panic!("{wrong:?}"));
        assert_eq!(location.user.as_deref(), Some("ga@te"));
        assert_eq!(location.password.as_deref(), Some(&b"p:w:x/"[..]));
        let hosts: Vec<(&str, Option<u16>)> = location.hosts.iter().map(|(host, port)| (&**host, *port)).collect();
        assert_eq!(hosts, [("db-1", Some(5433)), ("::1", None), ("db-3", None)]);
        assert_eq!(location.database.as_deref(), Some("my db"));
        let parameters: Vec<(&str, &str)> =
            location.parameters.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(parameters, [("password_x", "1"), ("sslmode", "require"), ("options", "-c a=b")]);
    }

    #[test]
    fn all_but_the_password_is_shown_and_reads_the_same() {
        for (text, shown) in [
            ("postgres://u:p@h/d", "postgres://u@h/d"),
            ("postgresql://u:p@h", "postgresql://u@h"),
            ("postgres://u@h:1,i:2/d?a=1&b=%20", "postgres://u@h:1,i:2/d?a=1&b=%20"),
            ("postgres://u@h/d?password=p", "postgres://u@h/d"),
            ("postgres://u@h/d?a=1&password=p&b=2", "postgres://u@h/d?a=1&b=2"),
            ("postgres://u@h/d?p%61ssword=p&b=2", "postgres://u@h/d?b=2"),
            ("postgres:///d?host=/run/postgresql", "postgres:///d?host=/run/postgresql"),
            ("postgres://:p@/d?host=h", "postgres://@/d?host=h"),
            ("postgres://", "postgres://"),
            // Without the colon, the user could be a password.
            ("redis://u:p@h,i:1/2?cluster=true", "redis://u:@h,i:1/2?cluster=true"),
            ("rediss://:p@h", "rediss://:@h"),
            ("redis://u@h?password=p", "redis://u:@h"),
        ] {
            let mut location = parts(text).unwrap_or_else(|wrong| panic!("{text}: {wrong:?}"));
            assert_eq!(location.shown, shown);
            let again = parts(shown).unwrap_or_else(|wrong| panic!("{shown}: {wrong:?}"));
            (location.password, location.is_password_among_them) = (None, false);
            location.is_user_alone = again.is_user_alone;
            assert!(again == location, "{text}");
        }
    }

    /// Whatever a password that is not encoded makes of a URL, nothing of it is shown.
    #[test]
    fn what_is_wrong_shows_nothing_of_the_password() {
        for text in [
            "postgres:u:s3cret@h/d",
            "postgres://u:s3@cret@h/d",
            "postgres://u:s3/cret@h/d",
            "postgres://u:s3?cret@h/d",
            "postgres://u:s3?cret=x@h/d",
            "postgres://u:s3#cret@h/d",
            "postgres://u:s3 cret@h/d",
            "postgres://u:s3%cret@h/d",
            "postgres://u:1/s3cret@h/d",
            "postgres://u@h/d?password=s3&cret",
            "postgres://u@h/d?password=s3&Cret!=",
            "postgres://u@h/d?password=s3cret%",
            "postgres://u:s3cret@h/d?password=s3cret",
            "postgres://u@h:s3cret/d",
            "postgres://u@h:0/d",
            "postgres://u@h:+1/d",
            "postgres://u@[h]/d",
            "postgres://u@[::1]5/d",
            "postgres://u@h,,i/d",
            "postgres://u@h/d/s3cret",
            "postgres://u@h/d?a=1&a=2",
            "postgres://u@h/%ff",
            "postgres://u@h/d?a=%00",
        ] {
            for text in [text.to_owned(), text.replacen("postgres", "redis", 1)] {
                let Err(wrong) = parts(&text) else { panic!("{text} is taken") };
                let said = format!("{wrong:?}");
                assert!(!said.contains("s3") && !said.to_lowercase().contains("cret"), "{text}: {said}");
                assert!(wrong.hint.is_some(), "{text}");
            }
        }
    }

    proptest! {
        /// Encoded, every password arrives as it is, and leaves no trace.
        #[test]
        fn an_encoded_password_arrives_and_is_not_shown(password in prop::collection::vec(any::<u8>(), 1..40)) {
            let encoded: String = password.iter().map(|byte| format!("%{byte:02X}")).collect();
            for (scheme, hidden) in [("postgres", ""), ("redis", ":")] {
                for (before, behind) in [(format!(":{encoded}"), "a=b".to_owned()), (String::new(), format!("password={encoded}&a=b"))] {
                    let text = format!("{scheme}://u{before}@h/d?{behind}");
                    let location = parts(&text).unwrap_or_else(|wrong| panic!("{wrong:?}"));
                    prop_assert_eq!(location.password.as_deref(), Some(&password[..]));
                    prop_assert_eq!(location.shown, format!("{scheme}://u{hidden}@h/d?a=b"));
                }
            }
        }

        /// Not encoded, it is taken as it stands or refused, but nothing of it is taken for something else, or shown.
        #[test]
        fn no_part_of_a_password_is_taken_for_something_else(middle in "[a-z0-9@/?#&%:=, \\[\\]]{0,12}") {
            let password = format!("Zq{middle}Zq");
            for (scheme, hidden) in [("postgres", ""), ("rediss", ":")] {
                match parts(&format!("{scheme}://u:{password}@h/d")) {
                    Ok(location) => {
                        prop_assert!(location.password.is_some());
                        prop_assert_eq!(location.shown, format!("{scheme}://u{hidden}@h/d"));
                    }
                    Err(wrong) => prop_assert!(!format!("{wrong:?}").contains("Zq"), "{wrong:?}"),
                }
            }
        }
    }
}
