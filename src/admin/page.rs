//! The admin page: static files in the binary. They hold no data, so they need no token; what the page shows, it asks the API
//! for, with the token that its user gives it.

use std::sync::LazyLock;

use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, ETAG, REFERRER_POLICY, SET_COOKIE};
use http::{HeaderMap, HeaderValue, StatusCode};
use sha2::{Digest, Sha256};

use super::answer::{Answer, empty, with_body};
use crate::http::headers::is_known;
use crate::idempotency::record::Hex;

/// A file of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum File {
    Index,
    Style,
    Main,
    Api,
    Dom,
    Now,
    Records,
    Record,
    Audit,
    Deliveries,
    Dialog,
    Icon,
}

/// What a browser may do with the page: run its scripts, and ask this listener. Nothing is inline, nothing comes from elsewhere, and
/// no form can be sent anywhere.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
);

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

impl File {
    pub(super) const ALL: [Self; 12] = [
        Self::Index,
        Self::Style,
        Self::Main,
        Self::Api,
        Self::Dom,
        Self::Now,
        Self::Records,
        Self::Record,
        Self::Audit,
        Self::Deliveries,
        Self::Dialog,
        Self::Icon,
    ];

    /// Its media type and its content.
    fn content(self) -> (&'static str, &'static str) {
        match self {
            Self::Index => (HTML, include_str!("page/index.html")),
            Self::Style => (CSS, include_str!("page/page.css")),
            Self::Main => (JAVASCRIPT, include_str!("page/main.js")),
            Self::Api => (JAVASCRIPT, include_str!("page/api.js")),
            Self::Dom => (JAVASCRIPT, include_str!("page/dom.js")),
            Self::Now => (JAVASCRIPT, include_str!("page/now.js")),
            Self::Records => (JAVASCRIPT, include_str!("page/records.js")),
            Self::Record => (JAVASCRIPT, include_str!("page/record.js")),
            Self::Audit => (JAVASCRIPT, include_str!("page/audit.js")),
            Self::Deliveries => (JAVASCRIPT, include_str!("page/deliveries.js")),
            Self::Dialog => (JAVASCRIPT, include_str!("page/dialog.js")),
            Self::Icon => ("image/svg+xml", include_str!("page/icon.svg")),
        }
    }

    /// The media type of its answer, without parameters.
    pub(super) fn media_type(self) -> &'static str {
        let (media_type, _) = self.content();
        media_type.split(';').next().unwrap_or(media_type)
    }

    /// What a client in code calls the request for it.
    pub(super) fn operation(self) -> &'static str {
        match self {
            Self::Index => "page",
            Self::Style => "pageStyle",
            Self::Main => "pageMain",
            Self::Api => "pageApi",
            Self::Dom => "pageDom",
            Self::Now => "pageNow",
            Self::Records => "pageRecords",
            Self::Record => "pageRecord",
            Self::Audit => "pageAudit",
            Self::Deliveries => "pageDeliveries",
            Self::Dialog => "pageDialog",
            Self::Icon => "pageIcon",
        }
    }

    /// Names its content. Another version of the gate has another one.
    fn tag(self) -> &'static HeaderValue {
        static TAGS: LazyLock<[HeaderValue; File::ALL.len()]> = LazyLock::new(|| {
            File::ALL.map(|file| {
                let digest = Sha256::digest(file.content().1);
                HeaderValue::try_from(format!("\"{}\"", Hex(&digest[..16]))).expect("hexadecimal digits in quotes")
            })
        });
        &TAGS[self as usize]
    }
}

/// The file, or 304 where the browser has it.
pub(super) fn answer(file: File, headers: &HeaderMap) -> Answer {
    let mut answer = if is_known(headers, file.tag()) {
        empty(StatusCode::NOT_MODIFIED)
    } else {
        let (media_type, content) = file.content();
        with_body(StatusCode::OK, media_type, content)
    };
    let own = answer.headers_mut();
    own.insert(CONTENT_SECURITY_POLICY, POLICY);
    own.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    // It is asked for again each time, so that the files of two versions never meet.
    own.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    own.insert(ETAG, file.tag().clone());
    debug_assert!(!own.contains_key(SET_COOKIE), "a token in a cookie could be used by other pages");
    answer
}

#[cfg(test)]
mod tests {
    use http::header::IF_NONE_MATCH;

    use super::*;

    /// Most that all files together may have, in bytes: they are in every binary.
    const MOST: usize = 120 << 10;

    #[test]
    fn the_files_are_small_and_each_has_its_own_tag() {
        assert!(File::ALL.map(|file| file.content().1.len()).iter().sum::<usize>() <= MOST);
        for (index, file) in File::ALL.into_iter().enumerate() {
            assert_eq!(file as usize, index, "{file:?}");
            assert!(File::ALL[..index].iter().all(|other| other.tag() != file.tag()), "{file:?}");
        }
    }

    #[test]
    fn every_outcome_has_its_meaning() {
        let (_, script) = File::Now.content();
        let (_, meanings) = script.split_once("const MEANINGS = {").unwrap();
        let (meanings, _) = meanings.split_once("};").unwrap();
        for outcome in crate::telemetry::outcome::Outcome::ALL {
            let word = outcome.as_str();
            assert!(meanings.contains(&format!("\"{word}\": \"")), "{word}");
        }
    }

    /// The policy of the page would refuse it, and a key or a reason could become a part of the page.
    #[test]
    fn nothing_is_inline_and_no_text_becomes_markup() {
        for file in File::ALL {
            let text = file.content().1;
            for banned in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"]
            {
                assert!(!text.contains(banned), "{file:?}: {banned}");
            }
            if file == File::Index {
                assert!(!text.contains(" style=") && !text.contains("<style") && !text.contains(" onclick"));
                assert_eq!(text.matches("<script").count(), text.matches("<script src=\"/page/").count());
            }
            let elsewhere = text
                .match_indices("://")
                .filter(|(at, _)| !text[..*at].ends_with("http") || !text[*at..].starts_with("://www.w3.org/2000/svg"));
            assert_eq!(elsewhere.count(), 0, "{file:?} names another host");
        }
    }

    #[test]
    fn a_browser_that_has_the_file_gets_no_other_one() {
        let tag = File::Main.tag().to_str().unwrap();
        for (sent, status) in [
            (tag.to_owned(), 304),
            (format!("W/{tag}"), 304),
            (format!("\"other\", {tag}"), 304),
            ("*".to_owned(), 304),
            ("\"other\"".to_owned(), 200),
            (tag.trim_matches('"').to_owned(), 200),
        ] {
            let headers = HeaderMap::from_iter([(IF_NONE_MATCH, sent.parse().unwrap())]);
            let answer = answer(File::Main, &headers);
            assert_eq!((answer.status().as_u16(), &answer.headers()[ETAG]), (status, File::Main.tag()), "{sent}");
        }
    }
}
