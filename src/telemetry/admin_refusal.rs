//! Why the admin listener refuses a request before it looks at what is asked for.

/// The reason of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminRefusal {
    /// It shows no token, and one is demanded.
    NoToken,
    /// It shows a token that is none of those in force.
    WrongToken,
    /// Too many wrong tokens came from its address.
    Throttled,
    /// Its token's role does not allow it.
    Role,
    /// A web page may have sent it.
    WebPage,
}

impl AdminRefusal {
    pub(super) const ALL: [Self; 5] = [Self::NoToken, Self::WrongToken, Self::Throttled, Self::Role, Self::WebPage];

    /// The word for it: the label `reason` of `oncegate_admin_refused_total`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoToken => "no-token",
            Self::WrongToken => "wrong-token",
            Self::Throttled => "throttled",
            Self::Role => "role",
            Self::WebPage => "web-page",
        }
    }
}
