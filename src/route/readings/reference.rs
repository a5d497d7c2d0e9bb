//! What servers do to paths, written another way than in `readings`: for tests and for fuzzing.

/// A path that some server makes of another.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) path: String,
    decodings: usize,
}

/// How many steps there are.
pub(super) const STEPS: usize = 8;

impl Reading {
    pub(super) fn of(path: &str) -> Self {
        Self { path: path.to_owned(), decodings: 0 }
    }

    /// After one more step. What is decoded again and again is read no further.
    pub(super) fn then(self, step: usize) -> Self {
        let path = done(step, &self.path);
        if step > 2 || path == self.path {
            return Self { path, ..self };
        }
        if self.decodings == 3 { self } else { Self { path, decodings: self.decodings + 1 } }
    }
}

/// The same path in small letters, and with a slash more or less.
pub(super) fn folds(path: &str) -> [String; 3] {
    let slash = path.strip_suffix('/').map_or_else(|| format!("{path}/"), str::to_owned);
    [path.to_ascii_lowercase(), slash.to_ascii_lowercase(), slash]
}

/// What a route says of each place of a path and of the host: more is stronger.
pub(super) fn claim(pattern: &str, has_host: bool) -> (Vec<u8>, bool) {
    let kinds = pattern[1..].split('/').map(|segment| match segment {
        _ if segment.starts_with("{*") => 0,
        _ if segment.starts_with('{') => 1,
        _ => 2,
    });
    (kinds.chain((!pattern.contains("{*")).then_some(2)).collect(), has_host)
}

/// Whether the one says more than the other of what both speak of.
pub(super) fn says_more((own, host): &(Vec<u8>, bool), (others, other_host): &(Vec<u8>, bool)) -> bool {
    let length = own.len().min(others.len());
    own[..length].cmp(&others[..length]).then(host.cmp(other_host)).is_gt()
}

fn done(step: usize, path: &str) -> String {
    let decoded = |meant: fn(char) -> bool| {
        let mut pieces = path.split('%');
        let first = pieces.next().unwrap().to_owned();
        pieces.fold(first, |path, piece| {
            let byte = piece.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).map(char::from);
            match byte.filter(|byte| meant(*byte)) {
                Some(byte) => format!("{path}{byte}{}", &piece[2..]),
                None => format!("{path}%{piece}"),
            }
        })
    };
    match step {
        0 => decoded(|byte| byte.is_ascii_alphanumeric() || "-._~".contains(byte)),
        1 => decoded(|byte| byte != '/'),
        2 => decoded(|_| true),
        3 => path.replace('\\', "/"),
        4 => path.split('/').map(|piece| piece.split(';').next().unwrap()).collect::<Vec<_>>().join("/"),
        5 => path.split(['\0', '?', '#']).next().unwrap().to_owned(),
        6 => std::iter::repeat_n((), 9).fold(path.to_owned(), |path, ()| path.replace("//", "/")),
        _ => {
            let (mut rest, mut out) = (path.to_owned(), String::new());
            while !rest.is_empty() {
                if rest.starts_with("/./") || rest == "/." {
                    rest = format!("/{}", rest.get(3..).unwrap_or_default());
                } else if rest.starts_with("/../") || rest == "/.." {
                    rest = format!("/{}", rest.get(4..).unwrap_or_default());
                    out.truncate(out.rfind('/').unwrap_or(0));
                } else {
                    let end = rest[1..].find('/').map_or(rest.len(), |at| at + 1);
                    out.extend(rest.drain(..end));
                }
            }
            out
        }
    }
}
