# api_calls.awk - a C function for each MN_API call of mneme.h (operators apart, whose arguments are in tables),
# that calls it with values chosen by number, and a table of them. attack_api.c includes what comes out.
#
#   mn_status mn_model_open(mn_model **out, const char *folder);
#
# becomes call_mn_model_open(pick): out is &made or NULL, folder is value_mn_model_open__folder(pick[1]).
# Handles and structs have values by their type, texts by call and name, others by type and name; an
# argument without values does not compile.

function trim(s) { sub(/^[ \t]+/, "", s); sub(/[ \t]+$/, "", s); return s }

# What names the values of an argument.
function kind_of(argument, call,    type, name) {
    name = argument
    sub(/^.*[ *]/, "", name)
    type = trim(substr(argument, 1, length(argument) - length(name)))
    if (type == "const char *") return call "__" name
    sub(/^const mn_/, "mn_", type)
    if (type ~ /^mn_[a-z_]+ \*$/) name = ""
    gsub(/\*/, "p", type)
    gsub(/ +/, "_", type)
    return name == "" ? type : type "__" name
}

function is_made(argument) { return argument ~ /^[a-z0-9_]+ \*\*[a-z]+$/ }

# "mn_model **out" -> "mn_model"
function made_type(argument) { sub(/ .*$/, "", argument); return argument }

function emit(text,    open, returns, name, list, n, i, at, values, counts, type) {
    sub(/^MN_API /, "", text)
    open = index(text, "(")
    name = substr(text, 1, open - 1)
    list = substr(text, open + 1, length(text) - open - 2)
    returns = name
    sub(/[a-z_0-9]+$/, "", returns)
    name = substr(name, length(returns) + 1)
    returns = trim(returns)
    n = list == "void" ? 0 : split(list, arguments, /, */)
    values = counts = ""
    at = 0
    for (i = 1; i <= n; i++) {
        if (returns == "mn_status" && is_made(arguments[i])) {
            at = i
            values = values (i > 1 ? ", " : "") "pick[" i - 1 "] ? NULL : &made"
            counts = counts " count_made,"
        } else {
            values = values (i > 1 ? ", " : "") "value_" kind_of(arguments[i], name) "(pick[" i - 1 "])"
            counts = counts " count_" kind_of(arguments[i], name) ","
        }
    }
    printf "static const char *call_%s(const int *pick) {\n    (void)pick;\n", name
    if (at) {
        type = made_type(arguments[at])
        printf "    %s *made = (%s *)poison;\n", type, type
        printf "    const mn_status st = %s(%s);\n", name, values
        printf "    const char *wrong = judge(st, made, pick[%d] != 0);\n", at - 1
        printf "    if (st == MN_OK && !wrong) drop_%s(made);\n    return wrong;\n}\n", type
    } else if (returns == "mn_status") {
        printf "    return said(%s(%s));\n}\n", name, values
    } else {
        printf "    %s%s(%s);\n", returns == "void" ? "" : "(void)", name, values
        printf "    %sreturn NULL;\n}\n", name ~ /_(destroy|close)$/ ? "forget_all();\n    " : ""
    }
    printf "static int (*const counts_%s[])(void) = {%s NULL };\n\n", name, counts
    rows = rows sprintf("    { \"%s\", %d, %s, call_%s, counts_%s },\n", name, n,
                        returns == "mn_status" ? "true" : "false", name, name)
}

/^MN_API / { inside = 1; text = "" }
inside {
    line = $0
    sub(/\/\/.*$/, "", line)
    text = text " " trim(line)
    if (line ~ /;[ \t]*$/) {
        inside = 0
        text = trim(text)
        gsub(/ +/, " ", text)
        emit(text)
    }
}
END { printf "static const api_call api_calls[] = {\n%s};\n", rows }
